"""Counters, events, and the sentence that explains a miss."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from compile_cache.errors import BypassCode, BypassReason
from compile_cache.keys import CaptureKey, GraphKey, Role, Signature, TensorSpec
from compile_cache.stats import Stats, explain_miss

STREAMED = BypassReason(BypassCode.STREAMED_WEIGHTS, "low VRAM")


def key(latent: tuple[int, ...] = (2, 4, 64, 64), tokens: int = 77, epoch: int = 1, **changes: Any) -> CaptureKey:
    tensors = (
        ("latent", TensorSpec(latent, "float16", "cuda")),
        ("context", TensorSpec((2, tokens, 768), "float16", "cuda")),
    )
    graph = GraphKey(Signature(tensors, changes.pop("values", ())), Role.UNET, "m", "inductor")
    return replace(CaptureKey(graph, "cuda:0", 1, epoch), **changes)


def explain(wanted: CaptureKey, *known: CaptureKey) -> str:
    return explain_miss(wanted.components(), [other.components() for other in known])


def test_the_first_graph_says_so() -> None:
    assert explain(key()) == "first graph of this module"


@pytest.mark.parametrize(
    ("wanted", "name", "old", "new"),
    [
        (key(latent=(2, 4, 90, 120)), "latent", "2x4x64x64 float16", "2x4x90x120 float16"),
        (key(tokens=154), "context", "2x77x768", "2x154x768"),
        (key(epoch=2), "weights epoch", "1", "2"),
        (key(device="cuda:1"), "device", "cuda:0", "cuda:1"),
        (key(owner=3), "module", "1", "3"),
    ],
)
def test_a_miss_names_the_one_component_that_differs(wanted: CaptureKey, name: str, old: str, new: str) -> None:
    text = explain(wanted, key())
    assert text.startswith(f"{name} ")
    before, after = text.split(" -> ")
    assert old in before
    assert new in after


def test_a_miss_is_compared_with_the_nearest_graph() -> None:
    far, near = key(latent=(1, 4, 8, 8), tokens=231, epoch=9), key(tokens=154)
    for known in ((far, near), (near, far)):
        assert explain(key(), *known).startswith("context ")


def test_every_difference_from_the_nearest_graph_is_named() -> None:
    text = explain(key(tokens=154, epoch=2), key())
    assert "context" in text
    assert "weights epoch 1 -> 2" in text
    assert "latent" not in text


def test_a_graph_that_was_freed_is_told_from_one_that_never_was() -> None:
    assert explain(key(), key()) == "nothing differs: the graph was evicted or freed"


@pytest.mark.parametrize("values", [(("y", None),), (("y", False),)])
def test_an_input_that_was_not_there_before_is_a_difference(values: Any) -> None:
    assert explain(key(values=values), key()).startswith("y ")


def test_long_values_are_shortened() -> None:
    many = tuple(range(100))
    assert len(explain(key(values=(("tiles", many),)), key(values=(("tiles", many[1:]),)))) < 150


def test_a_reason_is_news_once_and_counted_always() -> None:
    stats = Stats()
    assert [stats.bypass(STREAMED) for _ in range(3)] == [True, False, False]
    assert stats.counters.bypasses == {"streamed_weights": 3}
    assert [event.kind for event in stats.events] == ["bypass"]


def test_another_detail_of_the_same_code_is_news_and_counts_under_the_code() -> None:
    stats = Stats()
    stats.bypass(STREAMED)
    assert stats.bypass(replace(STREAMED, detail="DynamicVRAM"))
    assert stats.counters.bypasses == {"streamed_weights": 2}


def test_events_are_bounded_and_the_newest_stay() -> None:
    stats = Stats()
    for number in range(5000):
        stats.event("compile", str(number))
    assert len(stats.events) < 5000
    assert stats.events[-1].text == "4999"


def test_a_snapshot_is_plain_data_and_does_not_follow_the_counters() -> None:
    stats = Stats()
    stats.bypass(STREAMED)
    stats.counters.replays = 2
    before = stats.snapshot()
    stats.counters.replays += 1
    stats.bypass(STREAMED)
    assert json.loads(json.dumps(before)) == before
    assert before["replays"] == 2
    assert before["bypasses"] == {"streamed_weights": 1}
    assert set(before) == set(vars(stats.counters))
