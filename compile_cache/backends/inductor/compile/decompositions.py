"""Inductor's table of decompositions, with ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....torch_facts.private_names import decomposition_table
from . import frames, gelu, group_norm, quantizers, rotary
from .kitchen import NAMESPACE

POWER = torch.ops.aten.pow.Scalar


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The table by operator, for this process: an operator of another package is in it once that was imported."""
    known = decomposition_table()
    return {
        **known,
        group_norm.OPERATOR: group_norm.by_format(known[group_norm.OPERATOR]),
        frames.CAT: frames.cat_by(known.get(frames.CAT, _as_it_is)),
        frames.PAD: frames.pad_by(known.get(frames.PAD, _as_it_is)),
        POWER: _power_by(known.get(POWER, _as_it_is)),
        gelu.OPERATOR: gelu.by_approximation(known.get(gelu.OPERATOR, gelu.OPERATOR)),
        **of_kitchen(),
    }


def _power_by(known: Callable[..., Any]) -> Callable[..., Any]:
    """A number that follows sizes as the base, as in PiD's rotary tables: inductor takes every first argument of a
    power for a tensor.
    """

    def power(base: Any, exponent: torch.Tensor) -> Any:
        if isinstance(base, torch.SymFloat) and exponent.is_floating_point():
            return exponent.new_full((), base) ** exponent  # type: ignore[arg-type]
        return known(base, exponent)

    return power


def _as_it_is(*given: Any, **named: Any) -> Any:
    """The decomposition of an operator that inductor's table lacks."""
    return NotImplemented


def of_kitchen() -> dict[Any, Callable[..., Any]]:
    """For comfy-kitchen's quantizers and rotary operators, functions with their arguments and results; none before
    that is imported.
    """
    operators, ours = getattr(torch.ops, NAMESPACE), {**quantizers.BY_NAME, **rotary.BY_NAME}
    return {getattr(operators, name).default: made for name, made in ours.items() if hasattr(operators, name)}
