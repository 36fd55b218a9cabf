"""Weights of GGUF files, as ComfyUI-GGUF and its forks keep them: a tensor of bytes that knows its format.

Such a tensor has `tensor_type` (the format, an enumeration of the package gguf, or None), `tensor_shape` (of its
numbers) and `patches` (LoRAs). Its module decodes it in each call, and then applies the LoRAs. A trace replaces it by
its numbers, decoded from the bytes, so that the module has a plain weight and casts it as core's modules do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .gguf_types import FORMATS, decoded

LAYOUT = "GGUF "  # prefix of the names of these layouts: "GGUF Q4_K"
_PLAIN = (None, "F32", "F16")  # numbers that need no decoding


class GGUFForm:
    """The format in which one weight's bytes encode its numbers: see `WeightForm`."""

    count = 1

    def __init__(self, weight: Any) -> None:
        """Raises ValueError for a format that is not in `FORMATS`, and for bytes that are no whole number of blocks."""
        self.kind = type(weight)
        self.shape = tuple(weight.tensor_shape)
        self.tensor_type = getattr(weight, "tensor_type", None)
        self.format = _format(weight)
        if self.format not in _PLAIN:
            _refuse_unknown(self.format, weight.nbytes, self.shape)
        self.text = repr((str(weight.dtype), tuple(_alias(weight).shape), self.shape, self.format))

    @property
    def layout(self) -> str:
        return "" if self.format in _PLAIN else f"{LAYOUT}{self.format}"

    def parts(self, weight: Any) -> list[torch.Tensor]:
        return [_alias(weight)]

    def packed(self, data: torch.Tensor) -> torch.Tensor:
        """Return a weight of this form that consists of these bytes and has no LoRAs."""
        made: Any = data.as_subclass(self.kind)
        made.tensor_type, made.tensor_shape, made.patches = self.tensor_type, torch.Size(self.shape), []
        found: torch.Tensor = made
        return found

    def rebuild(self, parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Return the numbers, in the file's dtype or in float32, which is finer than any that the packs decode to."""
        (data,) = parts
        return data if self.format in _PLAIN else decoded(self.format, data, self.shape)


def is_gguf(weight: Any) -> bool:
    """True for a tensor of the packs. Reading its shape makes it store one if it has none."""
    return is_gguf_class(type(weight)) and weight.shape is not None and "tensor_shape" in vars(weight)


def is_gguf_class(kind: type) -> bool:
    """True for the class of such tensors, of any pack: it reports the shape of its numbers, not of its bytes."""
    return issubclass(kind, torch.Tensor) and isinstance(getattr(kind, "shape", None), property)


def patches_of(weight: Any) -> Sequence[tuple[Sequence[Any], str]]:
    """Return groups of core's patches (LoRAs) that the packs add to a weight in each call, each with its name."""
    found: Sequence[tuple[Sequence[Any], str]] = getattr(weight, "patches", None) or ()
    return found


def without_class(value: Any) -> Any:
    """Return a tensor of the packs that needs no decoding as a plain one on the same memory; any other value unchanged.

    If core gives a module the weights of the file without a conversion (DynamicVRAM), results of core's own layers have
    the packs' class.
    """
    if not is_gguf_class(type(value)) or _format(value) not in _PLAIN or patches_of(value):
        return value
    return _alias(value)


def why_unknown(weight: Any) -> str:
    """Return why a tensor of the packs has no form, for users; empty if it has one."""
    try:
        GGUFForm(weight)
    except ValueError as error:
        return str(error)
    return ""


def _format(weight: Any) -> Any:
    given = getattr(weight, "tensor_type", None)
    return given if given is None else getattr(given, "name", str(given))


def _refuse_unknown(format: str, size: int, shape: tuple[int, ...]) -> None:
    block = FORMATS.get(format)
    if block is None:
        raise ValueError(f"a weight has the GGUF format {format}, which Resolute cannot decode")
    if size * block.numbers != math.prod(shape) * block.bytes:
        raise ValueError(f"a weight of {size} bytes in the GGUF format {format} does not have the shape {shape}")


def _alias(weight: Any) -> torch.Tensor:
    """Return a plain tensor on the same memory: methods of a subclass return the subclass, the constructor does not."""
    return torch.Tensor(weight)
