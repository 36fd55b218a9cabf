"""Shared by all families: names of dimensions, and attention in a form that tracing can follow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ....compile_cache.attention import chooser as attention
from ....compile_cache.config import CacheConfig
from ....compile_cache.errors import BypassCode, BypassReason
from ....compile_cache.torch_compat.gpu import is_nvidia
from ..comfyui import chosen_attention
from ..comfyui.transformer_options import OVERRIDE, patches_of_attention

# Names of the dynamic dimensions. Feature maps: batch, channels, height, width. Tokens: batch, tokens, channels.
FEATURES = ("b", None, "h", "w")
TOKENS = ("b", "n", None)


class UnusableArgumentError(Exception):
    """An argument cannot be an input of a region; the message names it."""


def original(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of the module's class, bypassing a hook on the instance."""
    return type(module).forward(module, *args, **kwargs)


def traced_attention(
    function: Callable[..., Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    mask: torch.Tensor | None = None,
    attn_precision: Any = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """Core's `attention_pytorch` without its branches on size, as an `optimized_attention_override`.

    q, k, v: (batch, tokens, heads * width), or (batch, heads, tokens, width) with `skip_reshape`. Core's other
    implementations in plain torch (sub-quadratic, split) compute the same in slices that depend on free memory.
    function: core's own. It runs instead in blocks that run eagerly, so that another pack's changes take effect there.
    """
    if attention.is_eager_attention():
        form = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
        own: torch.Tensor = function(q, k, v, heads, mask=mask, attn_precision=attn_precision, **form, **kwargs)
        return own
    batch = q.shape[0]
    if not skip_reshape:
        width, grouped = q.shape[-1] // heads, bool(kwargs.get("enable_gqa", False))
        q = q.reshape(batch, -1, heads, width).transpose(1, 2)
        # Core's models also pass v as (batch, tokens, heads, width). Grouped keys and values have fewer heads.
        k, v = (t.reshape(batch, t.shape[1] if grouped else -1, -1 if grouped else heads, width) for t in (k, v))
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    if mask is not None:
        mask = mask[None, None] if mask.ndim == 2 else mask[:, None] if mask.ndim == 3 else mask
    extra = {name: kwargs[name] for name in ("scale", "enable_gqa") if name in kwargs}
    if is_nvidia(q.device) and _is_measured() and (mask is None or mask.ndim == 4):
        given = (_by_token(q), k, v, mask, extra.get("scale"), bool(extra.get("enable_gqa")))
        out = attention.operator()(*given).transpose(1, 2)
    else:
        with _preferred_kernels(q):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **extra)
    if skip_output_reshape:
        return out
    return out.transpose(1, 2).reshape(batch, -1, heads * out.shape[-1])


def _by_token(q: torch.Tensor) -> torch.Tensor:
    """q with the heads of a token adjacent in memory.

    Attention kernels lay out their result like q, and the matrix product after them reads it by token. The kernel that
    computes q can write this layout; a copy of the result would launch one more kernel.
    """
    by_head, by_token = q.stride()[1:3]
    if type(by_head) is int and type(by_token) is int and by_head <= by_token:  # in a trace it may be a SymInt
        return q
    return q.transpose(1, 2).contiguous().transpose(1, 2)


@functools.cache
def _is_measured() -> bool:
    # RESOLUTE_ATTENTION is a variable only, not a setting of the dialog: the cache's config would need `process/`.
    return CacheConfig.from_environment().attention == "measured"


def _preferred_kernels(q: torch.Tensor) -> Any:
    """A context with core's order of attention kernels: on CUDA, flash attention first."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if q.device.type == "cuda":
        return sdpa_kernel(order, set_priority=True)
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])


# The transformer_options of a traced block. Tracing would freeze the caller's values, so these contain none of them.
TRACED_OPTIONS: dict[str, Any] = {OVERRIDE: traced_attention}


def attention_patch(options: Mapping[str, Any]) -> BypassReason | None:
    """Why a transformer block must run eagerly: another node's patch acts inside it. None if there is no such patch.

    options: the transformer_options of the call. One of core's own attentions that the user chose is no patch.
    """
    if OVERRIDE in options and chosen_attention.attention_of(options) is None:
        return BypassReason(
            BypassCode.PATCHED_BLOCK, "another node overrides attention; transformer blocks run eagerly"
        )
    found = patches_of_attention(options)
    if not found:
        return None
    return BypassReason(
        BypassCode.PATCHED_BLOCK, f"another node patches {found[0]} inside transformer blocks; they run eagerly"
    )
