"""The attention kernels to choose from. Each is called by itself: torch's switch between them holds for the process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch


class Given(NamedTuple):
    """The arguments of one call of attention.

    q, k, v: (batch, heads, tokens, width). mask: None, or a tensor of torch.bool or of q's dtype that broadcasts to
    (batch, heads, tokens of q, tokens of k). enable_gqa: k and v may have fewer heads, each for a group of q's.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None = None
    scale: float | None = None
    enable_gqa: bool = False


# The result is (batch, heads, tokens of q, width of v).
Kernel = Callable[[Given], torch.Tensor]
Layout = tuple[int, tuple[int, ...]]  # the width of a tensor's heads, and its strides but for the batch's

FLASH, CUDNN = "flash", "cudnn"
# Slower than flash at every size where flash runs (by 1.1 to 2.2 times on an H200). It takes what flash refuses.
STAND_IN = "efficient"
_FULL_TILES, _WITH_A_REST = 256, 257  # tokens: on an H100 cuDNN compiled something for each of them
_ALIGNED = 16  # the efficient kernel reads rows of a mask that begin at multiples of so many numbers

_aten = torch.ops.aten


class RefusedError(Exception):
    """A kernel does not take such a call."""


def torchs_choice(given: Given) -> torch.Tensor:
    q, k, v, mask, scale, enable_gqa = given
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)


def _flash(given: Given) -> torch.Tensor:
    if given.mask is not None:
        raise RefusedError("it takes no mask")
    result: torch.Tensor = _aten._scaled_dot_product_flash_attention(*given[:3], scale=given.scale)[0]
    return result


def _cudnn(given: Given) -> torch.Tensor:
    q, k, v, *_ = given
    result: torch.Tensor = _aten._scaled_dot_product_cudnn_attention(q, k, v, bias(given), False, scale=given.scale)[0]
    return result


def compile_cudnn(device: torch.device, dtype: torch.dtype, layouts: Sequence[Layout]) -> None:
    """Run cuDNN on small tensors with the layouts of q, k and v, so that it compiles what larger ones need too.

    On an H100 that took 0.5 to 0.9 s, once on a machine. Raises what cuDNN raises.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        for tokens in (_FULL_TILES, _WITH_A_REST):
            shapes = [((1, 1, tokens, width), (tokens * strides[1], *strides)) for width, strides in layouts]
            q, k, v = (torch.empty_strided(*each, dtype=dtype, device=device) for each in shapes)
            _cudnn(Given(q, k, v))


def _efficient(given: Given) -> torch.Tensor:
    q, k, v, *_ = given
    added = bias(given)
    if added is not None:
        added = aligned(added.expand(*added.shape[:-1], k.shape[2])).expand(*q.shape[:3], k.shape[2])
    result: torch.Tensor = _aten._scaled_dot_product_efficient_attention(q, k, v, added, False, scale=given.scale)[0]
    return result


def bias(given: Given) -> torch.Tensor | None:
    """The mask as numbers of q's dtype that are added to the scores: 0 where a bool is true, else -inf.

    Raises RefusedError for another dtype: rounded to q's, its numbers could mean something else.
    """
    mask = given.mask
    if mask is None or mask.dtype == given.q.dtype:
        return mask
    if mask.dtype != torch.bool:
        raise RefusedError(f"its mask is {mask.dtype}")
    return torch.zeros_like(mask, dtype=given.q.dtype).masked_fill_(mask.logical_not(), float("-inf"))


def aligned(mask: torch.Tensor) -> torch.Tensor:
    """The same numbers in rows that begin at multiples of _ALIGNED numbers."""
    missing = -mask.shape[-1] % _ALIGNED
    return torch.nn.functional.pad(mask, (0, missing))[..., :-missing] if missing else mask


def with_masked_row(mask: torch.Tensor) -> torch.Tensor:
    """The mask with the least of its numbers for all keys of the first query; with False if it is of torch.bool."""
    changed = mask.clone(memory_format=torch.contiguous_format)
    changed[..., :1, :] = False if mask.dtype == torch.bool else mask.amin()
    return changed


def kernels_for(device: torch.device) -> dict[str, Kernel]:
    """The kernels to choose from, the preferred one first. Empty where torch chooses among its own: on a CPU."""
    if device.type != "cuda":
        return {}
    # People switch one off where it is wrong.
    switched: dict[str, Kernel] = {FLASH: _flash, STAND_IN: _efficient, CUDNN: _cudnn}
    return {name: kernel for (name, kernel), is_on in zip(switched.items(), switches(), strict=False) if is_on}


def switches() -> tuple[bool, ...]:
    """Torch's switches of flash, efficient, cuDNN's and plain attention, and the one for reproducible results."""
    cuda: Any = torch.backends.cuda
    found = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.cudnn_sdp_enabled, cuda.math_sdp_enabled)
    return (*(is_on() for is_on in found), torch.are_deterministic_algorithms_enabled())
