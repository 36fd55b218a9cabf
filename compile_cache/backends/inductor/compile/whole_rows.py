"""Norms that hold a whole row of a tensor at once.

Inductor reads a row longer than 1024 numbers (and one of more than 64 that does not lie in order) in a loop, and again
for the result. A transformer's rows have at most some thousands.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ....torch_facts.private_names import InductorChoices, inductor_graphs

_MOST = 4096  # numbers of a row: more need too many registers


def held_at_once() -> AbstractContextManager[Any]:
    """Inside, inductor makes such kernels in this thread."""
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
    """False for a length that is a symbol."""
    return bool(inductor_graphs.graph.sizevars.statically_known_leq(numbers, _MOST))
