"""Regions under what other packs change for everybody: torch's flags, autocast, functions that a block calls."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.torch_compat.flags import torch_flags

from ....rig import TOLERANCE, Attention, Bound, Rig, random, seeded

ATTENTION = "scaled_dot_product_attention"


def _louder(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return torch.ops.aten.scaled_dot_product_attention(q, k, v) * 1.5


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Another pack put its own attention into torch; `undo` takes it back."""
    strange = types.FunctionType(_louder.__code__, {"__name__": "custom_nodes.strange", "torch": torch})
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, ATTENTION, strange)
        yield patch


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return random(2, 9, 16), random(2, 7, 16, seed=1)


def call(bound: Bound, **changes: Any) -> torch.Tensor:
    """As the adapter calls: with the present flags."""
    return bound(*inputs(), torch_flags=torch_flags("cpu"), **changes)


def test_inside_autocast_a_block_runs_eagerly(rig: Rig) -> None:
    module = seeded(Attention)
    bound = rig.bind(module)
    call(bound)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        expected = module(*inputs())
        with rig.expect({"observed_input": 1}, eager_calls=1):
            actual = call(bound)
    assert expected.dtype == actual.dtype
    assert torch.equal(actual, expected)
    assert any("autocast" in detail for detail in rig.details)
    with rig.expect(region_calls=1, graph_calls=1):
        call(bound)


def test_autocast_entered_inside_the_model_counts_too(rig: Rig) -> None:
    module = seeded(Attention)
    bound = rig.bind(module)
    call(bound)

    def invoke(tensors: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return module(*tensors)

    with torch.inference_mode(), rig.expect({"observed_input": 1}, eager_calls=1):
        assert torch.equal(bound(*inputs(), invoke=invoke), invoke(inputs()))


def test_a_function_that_another_pack_exchanged_takes_effect_and_is_named(
    rig: Rig, exchanged: pytest.MonkeyPatch
) -> None:
    bound = rig.bind(seeded(Attention))
    with rig.expect({"replaced_forward": 1}, eager_calls=1):
        assert bound.error(*inputs()) == 0
    assert any(f"torch.nn.functional.{ATTENTION}" in detail for detail in rig.details)
    exchanged.undo()
    bound.weights_moved()  # as the adapter finds out at the start of a run
    louder = call(bound)
    with torch.inference_mode():
        assert (louder - bound.module(*inputs())).norm() <= TOLERANCE * louder.norm()


def test_it_takes_effect_in_a_model_that_was_compiled_without_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = rig.bind(seeded(Attention))
    call(bound)
    strange = types.FunctionType(_louder.__code__, {"__name__": "custom_nodes.strange", "torch": torch})
    monkeypatch.setattr(torch.nn.functional, ATTENTION, strange)
    bound.weights_moved()
    with rig.expect({"replaced_forward": 1}, eager_calls=1):
        assert bound.error(*inputs()) == 0


def test_nothing_that_was_traced_with_it_is_kept_for_the_next_process(
    tmp_path: Path, exchanged: pytest.MonkeyPatch
) -> None:
    one = Rig(InductorBackend(), store_folder=tmp_path, source="one")
    call(one.bind(seeded(Attention)))
    assert not list(tmp_path.glob("*/*.region"))
    exchanged.undo()
    two = Rig(InductorBackend(), store_folder=tmp_path, source="one")
    bound = two.bind(seeded(Attention))
    with two.expect(region_compiles=1, verifications=1, region_calls=1, graph_calls=1):
        call(bound)
    assert bound.error(*inputs()) <= TOLERANCE


def test_another_function_of_the_same_package_is_another_region(cold: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = cold.bind(seeded(Attention))
    call(bound)
    torchs = getattr(torch.nn.functional, ATTENTION)
    for number in (1.0, 2.0):
        monkeypatch.setattr(torch.nn.functional, ATTENTION, functools.partial(torchs, scale=number))
        bound.weights_moved()
        with cold.expect(region_compiles=1, verifications=1, region_calls=1, graph_calls=1):
            call(bound)
        assert bound.error(*inputs()) <= TOLERANCE
