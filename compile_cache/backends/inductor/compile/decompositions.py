"""Inductor's table of decompositions, with ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....torch_facts.private_names import decomposition_table
from . import frames, gelu, group_norm, quantizers, rotary
from .kitchen import NAMESPACE


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The table by operator, for this process: an operator of another package is in it once that was imported."""
    known = decomposition_table()
    return {
        **known,
        group_norm.OPERATOR: group_norm.by_format(known[group_norm.OPERATOR]),
        frames.CAT: frames.cat_by(known.get(frames.CAT, _as_it_is)),
        frames.PAD: frames.pad_by(known.get(frames.PAD, _as_it_is)),
        gelu.OPERATOR: gelu.by_approximation(known.get(gelu.OPERATOR, gelu.OPERATOR)),
        **of_kitchen(),
    }


def _as_it_is(*given: Any, **named: Any) -> Any:
    """The decomposition of an operator that inductor's table lacks."""
    return NotImplemented


def of_kitchen() -> dict[Any, Callable[..., Any]]:
    """For comfy-kitchen's quantizers and rotary operators, functions with their arguments and results; none before
    that is imported.
    """
    operators, ours = getattr(torch.ops, NAMESPACE), {**quantizers.BY_NAME, **rotary.BY_NAME}
    return {getattr(operators, name).default: made for name, made in ours.items() if hasattr(operators, name)}
