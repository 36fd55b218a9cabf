"""Which format of a model's file would be faster on this card: a line for people, once."""

from __future__ import annotations

import torch

from ....compile_cache.regions.weight_parts import is_plain
from ....compile_cache.texts import Text
from ....compile_cache.torch_facts.gpu import is_nvidia
from . import dynamic_vram
from .quantization import has_products

# By a card's compute capability: core's format, its name, and how many times as fast a step was as in bf16, as others
# measured. docs/formats.md has the sources. Data-center cards (8.0, 9.0) are left out: bf16 is fast there.
_FASTER = {
    (8, 6): ("int8_tensorwise", "int8", "2"),
    (8, 9): ("float8_e4m3fn", "fp8", "1.3"),
    (12, 0): ("nvfp4", "NVFP4", "1.7"),
}
_WIDE = (torch.bfloat16, torch.float16)
_LEAST_NUMBERS = 10**9  # of weights: smaller models have no such files
_LEAST_SHARE = 0.9  # of the numbers in matrices: models with convolutions (SDXL) have none either

_said: dict[str, str] = {}  # in which prompt, by model


def advice(model: str, module: torch.nn.Module, device: torch.device, prompt: str) -> Text | None:
    """The line, in the first prompt that asks for it of a model; None if the file is in the best format, or nothing is
    known. model: its fingerprint. prompt: the id of the one that runs.
    """
    if _said.setdefault(model, prompt) != prompt:  # two samplers of one prompt show the same
        return None
    faster = _FASTER.get(torch.cuda.get_device_capability(device)) if is_nvidia(device) else None
    if faster is None or not has_products(faster[0], device) or not _is_wide(module):
        return None
    text = "On such a card {format} files of large models run about {times} times as fast as bf16 (docs/formats.md)."
    return Text(text, format=faster[1], times=faster[2])


def _is_wide(module: torch.nn.Module) -> bool:
    """It is a large model that computes in 16 bits, nearly all in products of matrices."""
    total = matrices = 0
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is None:
                continue
            total += weight.numel()
            if weight.ndim == 2 and is_plain(weight):
                dtype = dynamic_vram.declared_dtype(part) if name == "weight" else weight.dtype
                matrices += weight.numel() if weight.dtype in _WIDE and dtype in _WIDE else 0
    return total >= _LEAST_NUMBERS and matrices >= _LEAST_SHARE * total
