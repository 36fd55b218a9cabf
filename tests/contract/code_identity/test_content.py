"""A digest of code is that of its content: the same in every process, and another one for other code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from compile_cache.code_identity.content import described

ROOT = Path(__file__).resolve().parents[3]

SOURCE = """
import functools
from dataclasses import dataclass

NAMES = frozenset({"attn", "mlp", "norm", "proj", "skip"})

def helper(x, *, scale=2.0):
    return x * scale

def wrapping(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper

@wrapping
def function(x, kind="silu", modes={"a": {1, 2, 3}}):
    if kind in {"silu", "gelu", "relu", "tanh", "mish"}:
        return [helper(each) for each in x]
    return (1, 1.0, True, -0.0, b"x", ..., (2, (3, "4"))), lambda: kind
"""

PRINTS = """
import sys
sys.path.insert(0, sys.argv[1])
from compile_cache.code_identity.content import described
from compile_cache.code_identity.reach import ReachCache
made = {"__name__": "made"}
exec(compile(sys.argv[2], sys.argv[3], "exec"), made)
import torch
print(described(made["function"]), described(made["NAMES"]))
kinds = [torch.nn.Linear, torch.nn.Conv2d, torch.nn.MultiheadAttention, torch.nn.GroupNorm, torch.nn.Dropout]
print(ReachCache().of(kinds).digest)
"""


def in_a_process(seed: int, source: str, file: str) -> str:
    command = [sys.executable, "-c", PRINTS, str(ROOT), source, file]
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def test_it_is_the_same_in_two_processes_with_other_seeds_files_and_lines() -> None:
    assert in_a_process(1, SOURCE, "/a/one.py") == in_a_process(2, "\n\n\n" + SOURCE, "/b/two.py")


def made(source: str, name: str = "function") -> Any:
    held: dict[str, Any] = {"__name__": "made"}
    exec(compile(source, "<made>", "exec"), held)  # noqa: S102
    return held[name]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("for each in x", "for each in x[1:]"),  # code inside code
        ("helper(each)", "other(each)"),  # a name
        ("-0.0", "0.0"),
        ("1.0", "1"),
        ("True", "1"),
        ('"mish"', '"mush"'),  # in a set
        ('kind="silu"', 'kind="gelu"'),  # a default
        ("{1, 2, 3}", "{1, 2, 4}"),
        ("return function(*args)", "return function(*args)[0]"),  # the decorator
        ("x, kind", "y, kind"),
    ],
)
def test_other_code_has_another_digest(old: str, new: str) -> None:
    assert old in SOURCE
    assert described(made(SOURCE.replace(old, new, 1))) != described(made(SOURCE))


def test_what_a_function_closes_over_counts() -> None:
    def closing(inner: Any, number: float) -> FunctionType:
        def function(x: Any) -> Any:
            return inner(x) * number

        return function

    others = [closing(torch.cos, 2.0), closing(torch.sin, 3.0), closing(closing(torch.sin, 2.0), 2.0)]
    assert described(closing(torch.sin, 2.0)) == described(closing(torch.sin, 2.0))
    assert all(described(each) != described(closing(torch.sin, 2.0)) for each in others)


def test_a_default_counts_as_it_was_before_a_call_wrote_into_it() -> None:
    def block(x: Any, options: dict[str, int] = {}) -> Any:  # noqa: B006
        options["index"] = options.get("index", 0) + 1
        return x

    before = described(block)
    block(1)
    assert described(block) == before
    block.__defaults__ = ({"index": 5},)
    assert described(block) != before


def test_a_function_that_closes_over_itself_has_a_digest() -> None:
    def function(n: int) -> int:
        return n and function(n - 1)

    assert described(function) == described(function)
