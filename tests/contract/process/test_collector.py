"""Python's collector, as the pack leaves it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.mark.parametrize(
    ("before", "after"),
    [((700, 10, 10), (700, 10, 1000)), ((0, 10, 10), (0, 10, 1000)), ((5000, 20, 4000), (5000, 20, 4000))],
    ids=["Python's own", "switched off", "a user's"],
)
def test_only_collections_of_all_objects_become_rare(
    adapter: Callable[[str], ModuleType], before: tuple[int, int, int], after: tuple[int, int, int]
) -> None:
    gc.set_threshold(*before)  # a fixture of all tests sets it back
    adapter("process.collector").leave_prompts_alone()
    assert gc.get_threshold() == after
