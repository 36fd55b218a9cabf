"""Inductor is asked to hold rows of up to 4096 numbers at once: its own choice is only widened."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch._inductor.choices import InductorChoices
from torch._inductor.virtualized import V

from compile_cache.backends.inductor.compile import lowering, whole_rows
from compile_cache.backends.inductor.compile.tracing import trace

from ....rig import random


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ours, where inductor itself never holds a row longer than 1024, and a symbol is known to be small by nobody."""

    def known(numbers: Any, limit: int) -> bool:
        return not isinstance(numbers, sympy.Symbol) and int(numbers) <= limit

    def torchs(features: Any, cooperative: bool) -> bool:
        return known(features.reduction_numel, 1024)

    monkeypatch.setattr(InductorChoices, "should_use_persistent_reduction", staticmethod(torchs))
    graph = SimpleNamespace(sizevars=SimpleNamespace(statically_known_leq=known))
    monkeypatch.setattr(whole_rows, "inductor_graphs", SimpleNamespace(graph=graph))
    return whole_rows._choices()


@pytest.mark.parametrize(
    ("numbers", "cooperative", "held"),
    [
        (64, False, True), (1280, False, True), (4096, False, True), (4097, False, False), (64, True, True),
        (1280, True, False), (sympy.Symbol("s"), False, False),
    ],
)  # fmt: skip
def test_rows_up_to_the_limit_are_held(choices: Any, numbers: Any, cooperative: bool, held: bool) -> None:
    features = SimpleNamespace(reduction_numel=numbers)
    assert choices.should_use_persistent_reduction(features, cooperative) is held


def test_a_compile_runs_under_our_choices_and_no_other_code_does(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    inner = lowering.compile_fx_inner

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(V.choices)
        return inner(*args, **kwargs)

    monkeypatch.setattr(lowering, "compile_fx_inner", watched)
    norm = torch.nn.LayerNorm(8).requires_grad_(False)
    given = random(2, 3, 8)
    traced = trace(lambda module, x: module(x), norm, [given], [("b", "n", None)], {"b": 17, "n": 3})
    lowering.compile_trace(traced)
    assert seen == [whole_rows._choices()]
    assert type(V.choices) is InductorChoices


def test_without_inductors_classes_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_rows, "InductorChoices", None)
    with whole_rows.held_at_once():
        assert type(V.choices) is InductorChoices
