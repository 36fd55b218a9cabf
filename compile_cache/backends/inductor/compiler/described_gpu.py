"""Compile for a GPU from its description, so that a worker needs no driver and uses no GPU memory.

Inductor and Triton generate the same code with these stand-ins as with the real GPU, but cannot benchmark kernels, see
`why_not`. Never run for AMD.
"""

from __future__ import annotations

import functools
import logging
import re
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ....torch_compat.gpu import is_nvidia
from ....torch_compat.private_names import (
    CachingAutotuner,
    ConvBackend,
    CudaInterface,
    FakeTensorMode,
    Feature,
    GPUTarget,
    UniformValueConstantFolder,
    fake_tensor,
    inductor_config,
    torch_c,
    triton_driver,
    triton_helpers,
    why_unavailable,
)

logger = logging.getLogger(__name__)
Description = dict[str, Any]  # the plain attributes of torch's device properties, and "index"

# Inductor's settings that make it run kernels at compile time.
_TIMED = ("max_autotune", "max_autotune_gemm", "benchmark_fusion", "benchmark_combo_kernel")
# Matches torch's errors about a missing GPU.
_DRIVER = re.compile(r"NVIDIA driver|(CUDA|HIP) (GPUs|error)|not compiled with CUDA|no active drivers")
_REGISTERS, _FRAME_SIZE = 0x2F, 0x11  # attribute numbers in .nv.info, see `_numbers_in`


def describe(device: torch.device) -> Description:
    """The description of a GPU of this process, in plain types."""
    found = torch.cuda.get_device_properties(device)
    values = {name: getattr(found, name) for name in dir(found) if not name.startswith("_")}
    plain = {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str))}
    return {**plain, "index": device.index or 0}


def why_not(device: torch.device) -> str:
    """Why workers cannot compile for the device, as a sentence without its full stop; empty if they can."""
    if missing := why_unavailable(Feature.WORKERS, Feature.KEEPING):
        return missing
    if device.type == "cpu":
        return ""
    timed = [name for name in _TIMED if getattr(inductor_config, name, False)]
    return _say(
        f"inductor times kernels while it compiles ({timed[0]})" if timed else why_unavailable(Feature.GPU_WORKERS)
    )


@functools.cache
def _say(why: str) -> str:
    if why:
        logger.info("Resolute: %s, so calls wait and compile for the GPU themselves", why)
    return why


def needs_real_gpu(error: BaseException) -> bool:
    """True if a compile failed because it needed the real GPU, not only its description."""
    return _DRIVER.search(str(error)) is not None


_taken: Description | None = None


def install_fake_gpu(description: Description) -> None:
    """Make torch, inductor and Triton see the described GPU in this process, for good. A repeated call with the same
    description does nothing. Raises any error of this torch's internals.
    """
    global _taken
    if description == _taken:
        return
    index, properties = description["index"], SimpleNamespace(**description)
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: index + 1,
        "current_device": lambda: index,
        "get_device_properties": lambda device=None: properties,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "_exchange_device": lambda device: index,
        "_maybe_exchange_device": lambda device: index,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
        if name.removeprefix("_") in vars(CudaInterface):
            setattr(CudaInterface, name.removeprefix("_"), staticmethod(answer))
    FakeTensorMode.avoid_device_init = True  # replaces a property that checks if there is a GPU
    fake_tensor.init_gpu_context = lambda device: None
    triton_helpers.set_driver_to_gpu = lambda: None
    triton_driver.set_active(SimpleNamespace(get_current_target=lambda: _target(properties)))
    CachingAutotuner._make_launchers = _note_registers
    _answer_for_convolutions(properties)
    _compute_constants_on_cpu()
    _taken = description


def _target(properties: Any) -> Any:
    if not is_nvidia("cuda"):
        return GPUTarget("hip", properties.gcnArchName.split(":")[0], properties.warp_size)
    return GPUTarget("cuda", 10 * properties.major + properties.minor, properties.warp_size)


def _answer_for_convolutions(properties: Any) -> None:
    """Torch asks the driver if cuDNN takes bfloat16; without a driver it plans results that are not channels-last."""
    choose = torch_c._select_conv_backend
    # Torch's own kernels on a GPU; over frames it uses the dilated kernel even without dilation.
    slow = (ConvBackend.Slow2d, ConvBackend.SlowDilated2d, ConvBackend.SlowDilated3d)

    def answer(*given: Any, **named: Any) -> Any:
        found, tensor = choose(*given, **named), (*given, named.get("input"))[0]
        has_cudnn = is_nvidia("cuda") and properties.major >= 8 and tensor.dtype == torch.bfloat16
        return ConvBackend.Cudnn if has_cudnn and tensor.is_cuda and found in slow else found

    torch_c._select_conv_backend = answer


def _compute_constants_on_cpu() -> None:
    """Inductor folds a graph's constants, such as a scale of 1, on the graph's device: redirect that to the CPU."""
    deduce = UniformValueConstantFolder._deduce_value

    def on_cpu(folder: Any, node: Any) -> Any:
        given = node.kwargs
        node.kwargs = {**given, "device": "cpu"} if given.get("device") is not None else given
        try:
            return deduce(folder, node)
        finally:
            node.kwargs = given

    UniformValueConstantFolder._deduce_value = on_cpu


def _note_registers(kernel: Any) -> None:
    """Replaces the loading of binaries. Inductor reads the registers: it tries smaller blocks for a large reduction."""
    for result in kernel.compile_results:
        result.kernel.n_regs, _ = registers_and_stack(result.kernel)
    kernel.launchers = []


def registers_and_stack(kernel: Any) -> tuple[int, int]:
    """Registers per thread, and bytes of stack for spilled values. kernel: Triton's, or inductor's static one."""
    path = Path(getattr(kernel, "cubin_path", None) or "")  # a static kernel has only the path of its binary
    if path.suffix == ".cubin" or "cubin" in getattr(kernel, "asm", ()):
        numbers = _numbers_in(path.read_bytes() if path.suffix else kernel.asm["cubin"])
        return numbers.get(_REGISTERS, 0), numbers.get(_FRAME_SIZE, 0)
    text = path.with_suffix(".amdgcn").read_text("utf-8") if path.suffix else kernel.asm["amdgcn"]
    found = (re.search(rf"\.{name}:\s+(\d+)", text) for name in ("vgpr_count", "private_segment_fixed_size"))
    registers, stack = (int(match[1]) if match else 0 for match in found)
    return registers, stack


def _numbers_in(binary: bytes) -> dict[int, int]:
    """Maximum over functions of each per-function attribute in a cubin's section .nv.info, by attribute number."""
    (table,) = struct.unpack_from("<Q", binary, 0x28)
    size, count, names = struct.unpack_from("<HHH", binary, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", binary, table + number * size) for number in range(count)]
    found: dict[int, int] = {}
    for name, _, _, _, start, length, *_ in headers:
        if not binary[headers[names][4] + name :].startswith(b".nv.info\0"):
            continue
        info, place = binary[start : start + length], 0
        while place + 4 <= len(info):
            form, attribute, value = struct.unpack_from("<BBH", info, place)
            if form == 4 and value >= 8:  # a function's index and its value
                found[attribute] = max(found.get(attribute, 0), struct.unpack_from("<I", info, place + 8)[0])
            place += 4 + (value if form == 4 else 0)
    return found
