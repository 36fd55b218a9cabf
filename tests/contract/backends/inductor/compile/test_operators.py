"""Operators of ours: another process that loads a trace or compiled code has all of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import torch

from compile_cache.backends.inductor.compile import operators

CORE = Path(operators.__file__).parents[3]


def test_every_file_that_defines_an_operator_is_registered() -> None:
    defining = {file.stem for file in CORE.rglob("*.py") if re.search(r"[ =]defined\(", file.read_text("utf-8"))}
    tree = ast.parse(Path(operators.__file__).read_text("utf-8"))
    registered = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert defining - {"operators"} == registered - {"annotations"}


def test_registering_defines_them_and_may_be_repeated() -> None:
    operators.register()
    operators.register()
    for name in ("attention", "chosen_attention", "own_memory", "cast_from_fp8", "w4a8_int8_linear"):
        assert callable(getattr(torch.ops.resolute, name).default)
