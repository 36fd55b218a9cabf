"""Choose the weight format with the fastest matmul: by the GPU's capability, then by one measurement per size."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import comfy.model_management
import torch

from ....compile_cache.attention.timing import seconds_of
from ....compile_cache.tuning.machine import machine_of
from ....compile_cache.tuning.tuner import Trial, Tuner
from ..process import runtime
from .quantized_weight import FORMATS, layout_of, settings_of

_LEAST_GAIN = 0.95  # a format must take at most this share of the seconds in the file's dtype
TOKENS, UNET_TOKENS = 4096, 2048  # of a 1024x1024 image, in a UNet's inner levels, where most weights are, with CFG
_FILE = "as in the file"


def preferred_format(device: torch.device) -> str | None:
    """The format that the GPU has matmul hardware for; None if no format is faster than 16 bits."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    management, capability = comfy.model_management, torch.cuda.get_device_capability(device)
    for name, least in (("nvfp4", (10, 0)), ("fp8", (8, 9)), ("int8", (7, 5))):
        supports = getattr(management, f"supports_{name}_compute", None)
        if capability >= least and layout_of(name) is not None and (supports is None or supports(device)):
            return name
    return None


def fastest(device: torch.device, tokens: int) -> Callable[[torch.Tensor], str | None]:
    """Returns a function from a weight to its fastest format, or None. Timings are stored for this machine.

    tokens: rows of the input that a matmul is timed with.
    """
    name = preferred_format(device)
    if name is None:
        return lambda weight: None
    config = runtime.cache().config
    folder = config.store_folder if config.remember else None
    tuner = Tuner[str, Trial]("formats of weights", str, Trial, folder and folder / "formats", machine_of)

    def choose(weight: torch.Tensor) -> str | None:
        if any(size % FORMATS[name].columns for size in weight.shape):
            return None
        rows, columns = weight.shape
        key = f"{name} {tokens}x{rows}x{columns} {weight.dtype}"
        trial = tuner.get(str(device), key)
        if trial is None:
            trial = _measured(name, weight, device, tokens)
            tuner.set(str(device), key, trial)
        return name if trial.fastest(_LEAST_GAIN) == name else None

    return choose


def _measured(name: str, weight: torch.Tensor, device: torch.device, tokens: int) -> Trial:
    """Time a matmul with the weight in the file's dtype and in the format.

    A compiled block fuses the input's quantization into its producer. A cast stands in for it: one pass over the input.
    """
    quant_ops: Any = importlib.import_module("comfy.quant_ops")
    there = weight.to(device)
    about = quant_ops.QUANT_ALGOS[FORMATS[name].name]
    layout = about["comfy_tensor_layout"]
    tensor = quant_ops.QuantizedTensor.from_float(there, layout, **settings_of(name, there))
    given = torch.randn(tokens, weight.shape[1], device=device, dtype=weight.dtype)
    quantizes = about.get("quantize_input", True)
    x = quant_ops.QuantizedTensor.from_float(given, layout) if quantizes else given

    def product() -> object:
        if quantizes:
            given.to(torch.float8_e4m3fn)
        return torch.nn.functional.linear(x, tensor)

    trial = Trial().with_run(_FILE, seconds_of(lambda: torch.nn.functional.linear(given, there), device))
    try:
        return trial.with_run(name, seconds_of(product, device))
    except RuntimeError as error:  # the kernel does not support these sizes
        return Trial(trial.seconds, trial.runs, {name: str(error).partition("\n")[0]})
