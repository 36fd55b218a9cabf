"""Rows 1 and 3: sizes and prompts."""

from __future__ import annotations

from typing import Any

from .kit import Check


def test_a_size_that_no_prompt_had(check: Check, tiny_prompt: Any, seed: int) -> None:
    check(tiny_prompt(seed=seed, width=152, height=88), forwards=5)
