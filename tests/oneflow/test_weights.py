"""Weights that are exchanged, edited or moved: a graph never answers with old ones, and never writes into ComfyUI's."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from .rig import TOLERANCE, Bound, Layers, random, rows, with_weights


def exchange(bound: Bound, layer: nn.Linear, weight: torch.Tensor) -> None:
    """What ComfyUI does to apply a LoRA: a new Parameter in the place of the old one."""
    layer.weight = nn.Parameter(weight, requires_grad=False)
    bound.changed()


def weight(seed: int) -> torch.Tensor:
    return random(Layers.width, Layers.width, seed=seed) / Layers.width**0.5


@pytest.fixture
def layers() -> Any:
    return with_weights(Layers())


@pytest.fixture
def bound(layers: Any) -> Bound:
    """Two signatures, each with its graph."""
    bound = Bound(layers)
    with bound.expect(captures=2, graph_calls=2):
        bound(rows(2))
        bound(rows(5))
    return bound


def test_weights_are_shared_and_not_copied(bound: Bound, layers: Any) -> None:
    """An edit in place needs no new epoch: there is only one memory."""
    layers.first.weight.mul_(-2.0)
    with bound.expect(replays=2):
        assert bound.error(rows(2)) <= TOLERANCE
        assert bound.error(rows(5)) <= TOLERANCE


def test_an_exchanged_weight_is_never_answered_with_the_old_one(bound: Bound, layers: Any) -> None:
    before = bound(rows(2))
    exchange(bound, layers.first, weight(5))
    after = bound(rows(2))
    assert not torch.allclose(before, after, rtol=0.1)
    for number in (2, 5, 2):
        assert bound.error(rows(number)) <= TOLERANCE


def test_the_first_exchange_builds_anew_and_every_later_one_only_copies(bound: Bound, layers: Any) -> None:
    exchange(bound, layers.first, weight(5))
    with bound.expect(captures=2, graph_calls=2):
        bound(rows(2))
        bound(rows(5))
    with bound.expect(replays=8):
        for seed in range(6, 10):
            exchange(bound, layers.first, weight(seed))
            assert bound.error(rows(2)) <= TOLERANCE
            assert bound.error(rows(5)) <= TOLERANCE


def test_the_exchanged_original_is_comfyuis_backup_and_stays_as_it_was(bound: Bound, layers: Any) -> None:
    backup, kept = layers.first.weight, layers.first.weight.clone()
    for seed in (5, 6):
        exchange(bound, layers.first, weight(seed))
        bound(rows(2))
        bound(rows(2))
    assert torch.equal(backup, kept)
    layers.first.weight = backup
    bound.changed()
    with bound.expect(replays=1):
        assert bound.error(rows(2)) <= TOLERANCE
    assert torch.equal(backup, kept)


def test_an_edit_in_place_of_an_exchanged_weight_is_seen_too(bound: Bound, layers: Any) -> None:
    """ComfyUI's hooks copy into the Parameter in the middle of a run; nothing but the values changes."""
    exchange(bound, layers.first, weight(5))
    bound(rows(2))
    with torch.inference_mode():
        layers.first.weight.data.copy_(weight(6))
    with bound.expect(replays=1):
        assert bound.error(rows(2)) <= TOLERANCE


def test_an_exchanged_buffer_counts_as_well(bound: Bound, layers: Any) -> None:
    layers.offset = torch.full((Layers.width,), 7.0)
    bound.changed()
    bound(rows(2))
    with bound.expect(replays=1):
        assert bound.error(rows(2)) <= TOLERANCE


def test_a_weight_of_another_shape_or_one_that_is_gone_does_not_reach_an_old_graph(bound: Bound, layers: Any) -> None:
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


def test_one_weight_under_two_names_stays_one(layers: Any) -> None:
    layers.second.weight = layers.first.weight
    bound = Bound(layers)
    bound(rows(2))
    layers.first.weight.mul_(0.5)
    with bound.expect(replays=1):
        assert bound.error(rows(2)) <= TOLERANCE


def shared_memory(layers: Any) -> weakref.ref[Any]:
    """The new memory of one weight: it lives as long as a tensor around it does."""
    memory = numpy.ones((Layers.width, Layers.width), numpy.float32)
    layers.first.weight = nn.Parameter(torch.from_numpy(memory), requires_grad=False)
    return weakref.ref(memory)


class TestMemory:
    """A graph shares the memory of ComfyUI's weights, and does not keep it."""

    def test_goes_with_the_module_and_its_program(self) -> None:
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

    def test_goes_as_soon_as_comfyui_has_other_weights(self, layers: Any) -> None:
        shared = shared_memory(layers)
        bound = Bound(layers)
        bound(rows(2))
        exchange(bound, layers.first, weight(5))
        assert shared() is not None
        bound.cache.drop_stale(bound.owner, bound.epoch)
        gc.collect()
        assert shared() is None
