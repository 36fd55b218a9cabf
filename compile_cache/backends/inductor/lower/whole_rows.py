"""Persistent reductions: norm kernels that keep a whole row in registers.

Inductor reads a row of more than 1024 elements (64 if not contiguous) in a loop, and a second time to compute the
result. A transformer's rows have at most a few thousand elements.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ....torch_compat.private_names import InductorChoices, inductor_graphs

_MOST = 4096  # elements of a row: more need too many registers


def persistent_reductions() -> AbstractContextManager[Any]:
    """In this block and thread, inductor generates persistent reductions for rows of up to 4096 elements."""
    if InductorChoices is None or inductor_graphs is None:
        return nullcontext()
    held: AbstractContextManager[Any] = inductor_graphs.set_choices_handler(_choices())
    return held


@functools.cache
def _choices() -> Any:
    class WholeRows(InductorChoices):  # type: ignore[misc]
        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            torchs = InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)
            return bool(torchs) or (not cooperative_reduction and _is_short(features.reduction_numel))

    return WholeRows()


def _is_short(numbers: Any) -> bool:
    """True if the row length is known to be at most 4096; False for a symbolic length."""
    return bool(inductor_graphs.graph.sizevars.statically_known_leq(numbers, _MOST))
