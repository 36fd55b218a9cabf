"""Pad the inputs of nvfp4 and mxfp8 products in every trace, at any size.

Such products process rows in blocks of 16 or 32. If an input's rows are not a multiple, comfy-kitchen pads them and
slices the result. In a trace, its check for a multiple would add a guard, and a later prompt of another size would
recompile. Padding a multiple and slicing nothing off have no effect, so traces always do both.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ....modules.slots import swapped
from .kitchen import NAMESPACE

_MODULES = ("nvfp4", "mxfp8")
_SHAPE, _CUT = "get_padded_shape", "_slice_to_original_shape"


class _Padded(tuple[Any, ...]):
    """A padded shape that compares unequal to every shape, so that comfy-kitchen always pads."""

    __slots__ = ()
    __hash__ = tuple.__hash__

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True


@contextmanager
def force_padding() -> Iterator[None]:
    """In this block, comfy-kitchen always pads inputs with symbolic sizes and slices the results, without a check."""
    modules = [found for name in _MODULES if (found := sys.modules.get(f"{NAMESPACE}.tensor.{name}")) is not None]
    kinds = [
        kind for module in modules for kind in vars(module).values() if isinstance(kind, type) and _SHAPE in vars(kind)
    ]
    before = [(kind, vars(kind)[_SHAPE]) for kind in kinds]
    cuts = [(vars(module), _CUT, _cut) for module in modules if hasattr(module, _CUT)]
    try:
        for kind, original in before:
            setattr(kind, _SHAPE, classmethod(_unequal(original.__func__)))
        with swapped(cuts):
            yield
    finally:
        for kind, original in before:
            setattr(kind, _SHAPE, original)


def _unequal(original: Any) -> Any:
    def get_padded_shape(cls: Any, orig_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        padded: tuple[Any, ...] = original(cls, orig_shape)
        return _Padded(padded) if _is_symbolic(orig_shape) else padded

    return get_padded_shape


def _cut(result: torch.Tensor, orig_m: Any, orig_n: Any) -> torch.Tensor:
    if _is_symbolic((orig_m,)):
        return result[:orig_m, :orig_n]
    return result if tuple(result.shape) == (orig_m, orig_n) else result[:orig_m, :orig_n]


def _is_symbolic(sizes: tuple[Any, ...]) -> bool:
    return any(isinstance(size, torch.SymInt) for size in sizes)
