"""Compile for a GPU that this process does not use: the main process describes it, and a worker takes its word.

A process that uses a GPU holds a CUDA context there, about 1.4 GiB. Inductor and Triton need of the GPU only its
properties, and the number of registers that each kernel takes, which the kernel's binary says. So a worker sees no GPU
(CUDA_VISIBLE_DEVICES is empty), and torch's functions answer from the description. Torch itself compiles this way in a
process without a GPU: see `FakeTensorMode.avoid_device_init`. Whatever asks the driver all the same fails, and the main
process compiles that region.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ....torch_private import (
    CachingAutotuner,
    CudaInterface,
    FakeTensorMode,
    GPUTarget,
    ensure_device_guard,
    fake_tensor,
    triton_driver,
    triton_helpers,
)

Description = dict[str, Any]  # a GPU's properties in plain types, by torch's names

_PLAIN = (bool, int, float, str)
_REGISTERS = 0x2F  # EIATTR_REGCOUNT, an entry of a binary's section .nv.info
_WITH_VALUES = 4  # the format of entries that have values behind their head


def is_possible() -> bool:
    """Whether this torch and this Triton compile for NVIDIA's GPUs without using one."""
    needed = (
        CachingAutotuner, CudaInterface, FakeTensorMode, GPUTarget, ensure_device_guard, fake_tensor, triton_driver,
        triton_helpers,
    )  # fmt: skip
    return torch.version.hip is None and all(name is not None for name in needed)


def describe(device: torch.device) -> Description | None:
    """The properties of a GPU; None where workers must use the GPU themselves (ROCm, another torch, no Triton)."""
    if not is_possible():
        return None
    properties = torch.cuda.get_device_properties(device)
    found = {name: getattr(properties, name) for name in dir(properties) if not name.startswith("_")}
    return {name: value for name, value in found.items() if type(value) in _PLAIN}


def use(description: Description, index: int) -> None:
    """In a worker that sees no GPU: make torch, inductor and Triton compile for the described one, with this index."""
    properties = SimpleNamespace(**description)
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: index + 1,
        "current_device": lambda: index,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_name": lambda device=None: properties.name,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
        "_exchange_device": lambda device: index,
        "_maybe_exchange_device": lambda device: index,
        "synchronize": lambda device=None: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
        own = name.removeprefix("_")
        if own in vars(CudaInterface):
            setattr(CudaInterface, own, staticmethod(answer))
    FakeTensorMode.avoid_device_init = True
    fake_tensor.init_gpu_context = lambda device: None
    ensure_device_guard()
    triton_helpers.set_driver_to_gpu = lambda: None
    CachingAutotuner._make_launchers = _note_registers
    target = GPUTarget("cuda", 10 * properties.major + properties.minor, properties.warp_size)
    driver = SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: index)
    triton_driver.set_active(driver)


def _note_registers(kernel: Any) -> None:
    """In place of loading the binaries. Inductor tries smaller blocks for a kernel that takes many registers."""
    for result in kernel.compile_results:
        binary = _binary(result.kernel)
        if binary is not None:
            result.kernel.n_regs = registers(binary)
    kernel.launchers = []


def _binary(kernel: Any) -> bytes | None:
    raw = getattr(kernel, "cubin_raw", None)
    path = getattr(kernel, "cubin_path", None)
    if raw is None and path is not None:
        return Path(path).read_bytes()
    found: bytes | None = raw or getattr(kernel, "asm", {}).get("cubin")
    return found


def registers(binary: bytes) -> int | None:
    """How many registers a thread of a kernel takes, by its binary (cubin, an ELF file); None if it does not say."""
    (table,) = struct.unpack_from("<Q", binary, 0x28)
    size, count, names = struct.unpack_from("<HHH", binary, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", binary, table + number * size) for number in range(count)]
    names_at = headers[names][4]
    for name, _, _, _, start, length, *_ in headers:
        if binary[names_at + name :].startswith(b".nv.info\0"):
            return _entry(binary[start : start + length], _REGISTERS)
    return None


def _entry(info: bytes, wanted: int) -> int | None:
    """The highest value of an attribute, which has one for each function: (number of the symbol, value)."""
    found, place = [], 0
    while place + 4 <= len(info):
        form, attribute, length = struct.unpack_from("<BBH", info, place)
        if form == _WITH_VALUES and attribute == wanted:
            found.append(struct.unpack_from("<I", info, place + 8)[0])
        place += 4 + (length if form == _WITH_VALUES else 0)
    return max(found, default=None)
