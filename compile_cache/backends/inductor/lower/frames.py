"""Keep feature maps of videos channels-last on CUDA from block to block, as inductor does for pictures.

By default inductor makes maps of frames contiguous (channel by channel), and plans convolutions for that layout. cuDNN
then copies the map to channels-last and the result back, and the norms around it read memory out of order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ....modules.slots import swapped
from ....torch_compat.gpu import is_nvidia
from ....torch_compat.private_names import ConvBackend, conv_formats
from .nearest import is_channels_last, read

CAT, PAD = torch.ops.aten.cat.default, torch.ops.aten.replication_pad3d.default
_ASKED = "_conv_determine_backend_memory_format"
_FRAMES = 2  # the frame dimension of a map (batch, channels, frames, height, width)


def convolutions_channels_last() -> AbstractContextManager[None]:
    """In this block and thread, inductor assumes that cuDNN's convolutions over frames return channels-last results,
    and lays out their inputs alike.
    """
    if conv_formats is None or ConvBackend is None:
        return nullcontext()
    original, ours = getattr(conv_formats, _ASKED), threading.get_ident()

    def answer(x: torch.Tensor, weight: torch.Tensor, backend: Any) -> Any:
        is_of_frames = x.ndim == 5 and backend == ConvBackend.Cudnn and threading.get_ident() == ours
        is_known = x.dtype != torch.float64 and x.shape[1] != 1  # cuDNN lacks float64; one channel fits any layout
        return torch.channels_last_3d if is_of_frames and is_known else original(x, weight, backend)

    return swapped([(vars(conv_formats), _ASKED, answer)])


def cat_by(elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """The table's decomposition of `aten.cat`: concatenate maps along frames in channels-last order."""

    def cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
        if dim != _FRAMES or not any(map(_is_map, tensors)):
            return elsewhere(tensors, dim)
        return torch.cat([each.movedim(1, -1) for each in tensors], 1).movedim(-1, 1)

    return cat


def pad_by(elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """The table's decomposition of `aten.replication_pad3d`: each position reads the map's nearest position."""

    def replication_pad3d(x: torch.Tensor, padding: Sequence[Any]) -> Any:
        if not _is_map(x):
            return elsewhere(x, padding)
        size = x.shape[_FRAMES:]
        by_dimension = [padding[4:6], padding[2:4], padding[0:2]]  # torch lists the last dimension first
        nearest = [
            torch.arange(-before, of + after, device=x.device).clamp(0, of - 1)
            for of, (before, after) in zip(size, by_dimension, strict=True)
        ]
        return read(x, nearest)

    return replication_pad3d


def _is_map(tensor: torch.Tensor) -> bool:
    return tensor.ndim == 5 and is_channels_last(tensor) and tensor.is_cuda and is_nvidia(tensor.device)
