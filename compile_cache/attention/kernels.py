"""The attention kernels to choose from. Each is called directly, because torch's switches are process-wide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch


class AttentionArgs(NamedTuple):
    """The arguments of one attention call.

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
Kernel = Callable[[AttentionArgs], torch.Tensor]
Layout = tuple[int, tuple[int, ...]]  # a tensor's head width, and its strides without the batch's

FLASH, CUDNN = "flash", "cudnn"
# The fallback for calls that flash refuses. Slower than flash at every size that flash runs (1.1 to 2.2x on an H200).
EFFICIENT = "efficient"
_FULL_TILES, _WITH_A_REST = 256, 257  # tokens: on an H100 cuDNN compiled separate code for each
_ALIGNED = 16  # elements: the efficient kernel needs mask rows that begin at multiples of this

_aten = torch.ops.aten


class RefusedError(Exception):
    """A kernel does not support the call."""


def torch_attention(args: AttentionArgs) -> torch.Tensor:
    q, k, v, mask, scale, enable_gqa = args
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)


def _flash(args: AttentionArgs) -> torch.Tensor:
    if args.mask is not None:
        raise RefusedError("it takes no mask")
    result: torch.Tensor = _aten._scaled_dot_product_flash_attention(*args[:3], scale=args.scale)[0]
    return result


def _cudnn(args: AttentionArgs) -> torch.Tensor:
    q, k, v, *_ = args
    result: torch.Tensor = _aten._scaled_dot_product_cudnn_attention(q, k, v, bias(args), False, scale=args.scale)[0]
    return result


def compile_cudnn(device: torch.device, dtype: torch.dtype, layouts: Sequence[Layout]) -> None:
    """Run cuDNN on small tensors with the layouts of q, k and v, so that it compiles the code for larger ones too.

    On an H100 this took 0.5 to 0.9 s, once on a machine. Raises cuDNN's errors.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        for tokens in (_FULL_TILES, _WITH_A_REST):
            shapes = [((1, 1, tokens, width), (tokens * strides[1], *strides)) for width, strides in layouts]
            q, k, v = (torch.empty_strided(*each, dtype=dtype, device=device) for each in shapes)
            _cudnn(AttentionArgs(q, k, v))


def _efficient(args: AttentionArgs) -> torch.Tensor:
    q, k, v, *_ = args
    added = bias(args)
    if added is not None:
        added = aligned(added.expand(*added.shape[:-1], k.shape[2])).expand(*q.shape[:3], k.shape[2])
    result: torch.Tensor = _aten._scaled_dot_product_efficient_attention(q, k, v, added, False, scale=args.scale)[0]
    return result


def bias(args: AttentionArgs) -> torch.Tensor | None:
    """Return the mask as a bias in q's dtype, added to the scores: 0 where a bool mask is true, else -inf.

    Raises RefusedError for a mask of another dtype, because rounding to q's dtype could change its meaning.
    """
    mask = args.mask
    if mask is None or mask.dtype == args.q.dtype:
        return mask
    if mask.dtype != torch.bool:
        raise RefusedError(f"its mask is {mask.dtype}")
    return torch.zeros_like(mask, dtype=args.q.dtype).masked_fill_(mask.logical_not(), float("-inf"))


def aligned(mask: torch.Tensor) -> torch.Tensor:
    """Return the mask with rows padded in memory, so that each begins at a multiple of _ALIGNED elements."""
    missing = -mask.shape[-1] % _ALIGNED
    return torch.nn.functional.pad(mask, (0, missing))[..., :-missing] if missing else mask


def with_masked_row(mask: torch.Tensor) -> torch.Tensor:
    """Return a copy that masks all keys of the first query: with False if the mask is bool, else with its minimum."""
    changed = mask.clone(memory_format=torch.contiguous_format)
    changed[..., :1, :] = False if mask.dtype == torch.bool else mask.amin()
    return changed


def kernels_for(device: torch.device) -> dict[str, Kernel]:
    """Return the kernels to choose from, the preferred one first. Empty on a CPU, where torch chooses its own."""
    if device.type != "cuda":
        return {}
    # Users switch off a kernel that gives wrong results.
    switched: dict[str, Kernel] = {FLASH: _flash, EFFICIENT: _efficient, CUDNN: _cudnn}
    return {name: kernel for (name, kernel), is_on in zip(switched.items(), switches(), strict=False) if is_on}


def switches() -> tuple[bool, ...]:
    """Return torch's switches for flash, efficient, cuDNN and math attention, and for deterministic algorithms."""
    cuda: Any = torch.backends.cuda
    found = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.cudnn_sdp_enabled, cuda.math_sdp_enabled)
    return (*(is_on() for is_on in found), torch.are_deterministic_algorithms_enabled())
