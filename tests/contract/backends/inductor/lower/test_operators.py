"""Operators of ours: another process that loads a trace or compiled code has all of them."""

from __future__ import annotations

import ast
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_cache.attention import chooser, chosen
from compile_cache.backends.inductor.lower import operators
from compile_cache.torch_compat.operators import defined

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


def test_threads_that_define_an_operator_at_once_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a start, a call loads stored code while another thread defines the operators of later compiles."""
    define = torch.library.define

    def slowly(*given: Any, **named: Any) -> None:
        time.sleep(0.05)  # the others arrive meanwhile
        define(*given, **named)

    monkeypatch.setattr(torch.library, "define", slowly)
    with ThreadPoolExecutor(4) as threads:
        operator = ("for_a_test", "(Tensor x) -> Tensor", torch.clone, torch.clone)
        asked = [threads.submit(defined, *operator) for _ in range(4)]
        found = {each.result() for each in asked}
    assert len(found) == 1
    assert torch.equal(found.pop()(torch.ones(2)), torch.ones(2))


def test_copies_of_the_pack_share_what_an_operator_reads(pack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever copy defined the operator, it runs the function that any of them names."""
    other = pack("compile_cache.attention.chosen")
    assert other is not chosen
    for name in list(chosen._finds):  # another test may have imported the adapter, which asks ComfyUI
        monkeypatch.delitem(chosen._finds, name)
    q = torch.randn(2, 5, 8)
    for number, copy in enumerate((chosen, other)):
        monkeypatch.setitem(chosen._finds, f"copy {number}", {}.get)  # taken out again after the test
        functions = {f"times {number + 2}": lambda q, *rest, factor=number + 2, **named: q * factor}
        copy.use(f"copy {number}", functions.get)
    for copy in (chosen, other):
        for factor in (2, 3):
            given = (q, q, q, f"times {factor}", 2, None, False, False, None, False, True)
            assert torch.equal(copy.operator()(*given), q * factor)
    with pytest.raises(LookupError, match="No attention has the name 'gone'"):
        chosen.operator()(q, q, q, "gone", 2, None, False, False, None, False, True)
    assert pack("compile_cache.attention.chooser").chooser is chooser.chooser
