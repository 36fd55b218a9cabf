"""The operator for an attention function that the user chose and that cannot be traced.

Compiled code calls it as one opaque operator with a name. The application resolves the name (`use`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..torch_compat.operators import defined, shared

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, str name, int heads, Tensor? mask, bool skip_reshape, bool skip_output_reshape, "
    "float? scale, bool enable_gqa, bool low_precision) -> Tensor"
)
Find = Callable[[str], Callable[..., torch.Tensor] | None]

_finds: dict[str, Find] = shared("finds_chosen_attention", dict)  # by copy of this pack in the process


def use(copy: str, find: Find) -> None:
    """Resolve names with `find`: it returns the function of a name, which takes the operator's arguments, or None.

    copy: a name that no other copy of this pack has; `find` replaces an earlier one of the same copy.
    """
    _finds[copy] = find


@functools.cache
def operator() -> Callable[..., torch.Tensor]:
    """`torch.ops.resolute.chosen_attention`: runs the attention function of a name, see `_SCHEMA`.

    q, k, v: (batch, tokens, heads * width), or (batch, heads, tokens, width) with `skip_reshape`. Returns (batch,
    tokens, heads * width), or (batch, heads, tokens, width) with `skip_output_reshape`; contiguous.
    """
    return defined("chosen_attention", _SCHEMA, _run, _empty_result)


def _run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, name: str, heads: int, mask: torch.Tensor | None,
    skip_reshape: bool, skip_output_reshape: bool, scale: float | None, enable_gqa: bool, low_precision: bool,
) -> torch.Tensor:  # fmt: skip
    # Pass only non-default arguments: some functions would use a None as the scale.
    more: dict[str, Any] = {} if scale is None else {"scale": scale}
    more |= {"enable_gqa": True} if enable_gqa else {}
    more |= {} if low_precision else {"low_precision_attention": False}
    result = _named(name)(
        q, k, v, heads, mask=mask, skip_reshape=skip_reshape, skip_output_reshape=skip_output_reshape, **more
    )
    shares = any(result.untyped_storage().data_ptr() == each.untyped_storage().data_ptr() for each in (q, k, v))
    return result.clone() if shares else result.contiguous()


def _named(name: str) -> Callable[..., torch.Tensor]:
    for find in reversed(_finds.values()):
        if (function := find(name)) is not None:
            return function
    raise LookupError(f"No attention has the name {name!r} any more. Choose another one, and run again.")


def _empty_result(q: Any, k: Any, v: Any, name: str, heads: int, mask: Any, *flags: Any) -> Any:
    skip_reshape, skip_output_reshape = flags[:2]
    if skip_reshape:
        batch, _, tokens, width = q.shape
    else:
        batch, tokens, width = q.shape[0], q.shape[1], q.shape[2] // heads
    shape = (batch, heads, tokens, width) if skip_output_reshape else (batch, tokens, heads * width)
    return q.new_empty(shape)
