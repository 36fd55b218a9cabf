"""Inductor's decomposition table, extended by ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....torch_compat.private_names import decomposition_table
from . import frames, gelu, group_norm, quantizers, rotary
from .kitchen import NAMESPACE

POWER = torch.ops.aten.pow.Scalar


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions by operator. Operators of another package are included once the package is imported."""
    known = decomposition_table()
    return {
        **known,
        group_norm.OPERATOR: group_norm.by_format(known[group_norm.OPERATOR]),
        frames.CAT: frames.cat_by(known.get(frames.CAT, _no_decomposition)),
        frames.PAD: frames.pad_by(known.get(frames.PAD, _no_decomposition)),
        POWER: _power_by(known.get(POWER, _no_decomposition)),
        gelu.OPERATOR: gelu.by_approximation(known.get(gelu.OPERATOR, gelu.OPERATOR)),
        **of_kitchen(),
    }


def _power_by(known: Callable[..., Any]) -> Callable[..., Any]:
    """Handle a symbolic number as the base, as in PiD's rotary tables: inductor assumes that the first argument of a
    power is a tensor.
    """

    def power(base: Any, exponent: torch.Tensor) -> Any:
        if isinstance(base, torch.SymFloat) and exponent.is_floating_point():
            return exponent.new_full((), base) ** exponent  # type: ignore[arg-type]
        return known(base, exponent)

    return power


def _no_decomposition(*given: Any, **named: Any) -> Any:
    """The fallback for an operator that inductor's table lacks: no decomposition."""
    return NotImplemented


def of_kitchen() -> dict[Any, Callable[..., Any]]:
    """Decompositions of comfy-kitchen's quantizers and rotary operators, with the operators' signatures; empty until
    comfy-kitchen is imported.
    """
    operators, ours = getattr(torch.ops, NAMESPACE), {**quantizers.BY_NAME, **rotary.BY_NAME}
    return {getattr(operators, name).default: made for name, made in ours.items() if hasattr(operators, name)}
