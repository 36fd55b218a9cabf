"""The buffers that a weight consists of: one for an ordinary tensor, several for a quantized one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ....compile_cache.regions.region_weights import is_plain


def is_readable(tensor: torch.Tensor) -> bool:
    """True if `addresses` tells of every change of the tensor: it is plain, or it can list its parts.

    Quantized tensors of core list their data and scales (torch's protocol for traceable subclasses). Those of GGUF
    packs carry a LoRA in an attribute that nothing lists.
    """
    return is_plain(tensor) or hasattr(type(tensor), "__tensor_flatten__")


def addresses(tensor: torch.Tensor) -> Iterator[Any]:
    """Addresses of a readable tensor's parts, and how they belong together. Raises RuntimeError without a storage."""
    if is_plain(tensor):
        yield tensor.data_ptr()
        return
    names, form = getattr(tensor, "__tensor_flatten__")()  # noqa: B009 (torch declares it nowhere)
    yield repr(form)
    for name in names:
        yield from addresses(getattr(tensor, name))
