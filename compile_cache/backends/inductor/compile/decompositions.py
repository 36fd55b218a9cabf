"""Inductor's table of decompositions, with ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....torch_facts.private_names import decomposition_table
from . import gelu, group_norm, quantizers, rotary


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The table by operator, for this process: an operator of another package is in it once that was imported."""
    known = decomposition_table()
    return {
        **known,
        group_norm.OPERATOR: group_norm.by_format(known[group_norm.OPERATOR]),
        gelu.OPERATOR: gelu.by_approximation(known.get(gelu.OPERATOR, gelu.OPERATOR)),
        **quantizers.by_operator(),
        **rotary.by_operator(),
    }
