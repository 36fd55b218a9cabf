"""Weights that are replaced, edited or moved: a graph never uses old values and never writes to ComfyUI's memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from .rig import TOLERANCE, Bound, Layers, random, rows, with_weights


def replace_weight(bound: Bound, layer: nn.Linear, weight: torch.Tensor) -> None:
    """Replace the Parameter, as ComfyUI does to apply a LoRA."""
    layer.weight = nn.Parameter(weight, requires_grad=False)
    bound.changed()


def weight(seed: int) -> torch.Tensor:
    return random(Layers.width, Layers.width, seed=seed) / Layers.width**0.5


@pytest.fixture
def layers() -> Any:
    return with_weights(Layers())


@pytest.fixture
def bound(layers: Any) -> Bound:
    """Two signatures, each with a graph."""
    bound = Bound(layers)
    with bound.expect(captures=2, graph_calls=2):
        bound(rows(2))
        bound(rows(5))
    return bound


def test_weights_are_shared_and_not_copied(bound: Bound, layers: Any) -> None:
    """An edit in place needs no new epoch, because the memory is shared."""
    layers.first.weight.mul_(-2.0)
    with bound.expect(replays=2):
        assert bound.error(rows(2)) <= TOLERANCE
        assert bound.error(rows(5)) <= TOLERANCE


def test_a_replaced_weight_is_used_and_never_the_old_one(bound: Bound, layers: Any) -> None:
    before = bound(rows(2))
    replace_weight(bound, layers.first, weight(5))
    after = bound(rows(2))
    assert not torch.allclose(before, after, rtol=0.1)
    for number in (2, 5, 2):
        assert bound.error(rows(number)) <= TOLERANCE


def test_the_first_replacement_rebuilds_graphs_and_later_ones_only_copy(bound: Bound, layers: Any) -> None:
    replace_weight(bound, layers.first, weight(5))
    with bound.expect(captures=2, graph_calls=2):
        bound(rows(2))
        bound(rows(5))
    with bound.expect(replays=8):
        for seed in range(6, 10):
            replace_weight(bound, layers.first, weight(seed))
            assert bound.error(rows(2)) <= TOLERANCE
            assert bound.error(rows(5)) <= TOLERANCE


def test_the_replaced_original_is_comfyuis_backup_and_stays_unchanged(bound: Bound, layers: Any) -> None:
    backup, kept = layers.first.weight, layers.first.weight.clone()
    for seed in (5, 6):
        replace_weight(bound, layers.first, weight(seed))
        bound(rows(2))
        bound(rows(2))
    assert torch.equal(backup, kept)
    layers.first.weight = backup
    bound.changed()
    with bound.expect(replays=1):
        assert bound.error(rows(2)) <= TOLERANCE
    assert torch.equal(backup, kept)


def test_an_edit_in_place_of_a_replaced_weight_is_seen(bound: Bound, layers: Any) -> None:
    """ComfyUI's hooks copy into the Parameter in the middle of a run; only the values change."""
    replace_weight(bound, layers.first, weight(5))
    bound(rows(2))
    with torch.inference_mode():
        layers.first.weight.data.copy_(weight(6))
    with bound.expect(replays=1):
        assert bound.error(rows(2)) <= TOLERANCE


def test_a_replaced_buffer_is_used_too(bound: Bound, layers: Any) -> None:
    layers.offset = torch.full((Layers.width,), 7.0)
    bound.changed()
    bound(rows(2))
    with bound.expect(replays=1):
        assert bound.error(rows(2)) <= TOLERANCE


def test_a_graph_is_rebuilt_if_a_weight_changes_its_shape_or_is_removed(bound: Bound, layers: Any) -> None:
    layers.first = with_weights(nn.Linear(Layers.width, Layers.width, bias=False), seed=3)
    bound.changed()
    for _ in range(2):
        assert bound.error(rows(2)) <= TOLERANCE


def test_a_weight_that_is_not_contiguous_is_copied(layers: Any) -> None:
    layers.first.weight = nn.Parameter(weight(8).t(), requires_grad=False)
    bound = Bound(layers)
    bound(rows(2))
    with bound.expect(replays=1):
        assert bound.error(rows(2)) <= TOLERANCE


def test_a_weight_with_two_names_stays_shared(layers: Any) -> None:
    layers.second.weight = layers.first.weight
    bound = Bound(layers)
    bound(rows(2))
    layers.first.weight.mul_(0.5)
    with bound.expect(replays=1):
        assert bound.error(rows(2)) <= TOLERANCE


def shared_memory(layers: Any) -> weakref.ref[Any]:
    """Give one weight new memory, which lives as long as a tensor uses it; return a weak reference to it."""
    memory = numpy.ones((Layers.width, Layers.width), numpy.float32)
    layers.first.weight = nn.Parameter(torch.from_numpy(memory), requires_grad=False)
    return weakref.ref(memory)


class TestMemory:
    """A graph shares the memory of ComfyUI's weights and does not keep it alive."""

    def test_is_freed_with_the_module_and_its_program(self) -> None:
        layers = with_weights(Layers())
        shared = shared_memory(layers)
        bound = Bound(layers)
        bound(rows(2))
        assert bound.cache.stats.counters.captures == 1
        del layers
        gc.collect()
        assert shared() is not None, "the graph shares the memory"
        bound.cache.forget(bound.owner)
        del bound.program
        gc.collect()
        assert shared() is None

    def test_is_freed_as_soon_as_comfyui_has_other_weights(self, layers: Any) -> None:
        shared = shared_memory(layers)
        bound = Bound(layers)
        bound(rows(2))
        replace_weight(bound, layers.first, weight(5))
        assert shared() is not None
        bound.cache.drop_stale(bound.owner, bound.epoch)
        gc.collect()
        assert shared() is None
