"""Places nodes before or after Compile Model and checks that they have an effect."""

from __future__ import annotations

from typing import Any

import pytest

from ..rig import PromptDict, assert_different, compile_model, with_model
from .kit import Check

before_and_after = pytest.mark.parametrize("place", ["before", "after"])


def placed(prompt: PromptDict, others: list[dict[str, Any]], place: str, backend: str) -> PromptDict:
    """The prompt with `others` in this order, all before or all after Compile Model."""
    ours = [compile_model(backend)]
    return with_model(prompt, *(others + ours if place == "before" else ours + others))


def check_placed(
    check: Check, prompt: PromptDict, others: list[dict[str, Any]], place: str, *, forwards: int, **expected: Any
) -> Any:
    """Check a prompt with `others`, which must change the image; otherwise equal images would prove nothing."""
    untouched = check.bench.run(prompt)
    ours = placed(prompt, others, place, check.backend)
    run = check(with_model(prompt, *others), ours, forwards=forwards, **expected)
    assert_different(run, untouched)
    return run
