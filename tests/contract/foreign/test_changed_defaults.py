"""A container that is a default and that the code writes into is the code's own memory, in each Python's bytecode."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import pytest

from compile_cache.foreign.functions import changed_defaults

WRITES = [
    'd["x"] = 1',
    'd["x"] += 1',
    'del d["x"]',
    "d.update(x=1)",
    'd[f"a{x}"] = x',
    'd[len(d)] -= d["x"]',
    "d[x] = x",
    "for each in x: d[each] = 1",
]
READS = ['return d["x"]', 'return x(d)["x"]', 'x["a"] = d["x"]', 'x["a"][d["k"]] = 1', 'return d["a"] < d["b"] < 3']


def function(body: str) -> FunctionType:
    held: dict[str, Any] = {}
    exec(f"def function(x, d={{}}):\n    {body}", held)  # noqa: S102
    made: FunctionType = held["function"]
    return made


@pytest.mark.parametrize("body", WRITES)
def test_a_default_that_is_written_into_is_found(body: str) -> None:
    assert changed_defaults([function(body)]) == {"d"}


@pytest.mark.parametrize("body", READS)
def test_one_that_is_only_read_is_not(body: str) -> None:
    assert changed_defaults([function(body)]) == frozenset()


def test_another_function_may_write_into_it() -> None:
    assert changed_defaults([function("return other(x, d)"), function('d["x"] = 1')]) == {"d"}
