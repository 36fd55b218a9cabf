"""Captures: limited by bytes, the oldest evicted first, pinned ones kept, each closed once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from compile_cache.cache.captures import Captures
from compile_cache.keys import ANY_EPOCH, CaptureKey

from ..fakes import FakeGraph, Module

BUDGET = 10


def key(owner: int, epoch: int = 1) -> CaptureKey:
    """The key of a module's only capture."""
    return CaptureKey(Module().call().key, "cpu", owner, epoch)


def graph(size: int) -> FakeGraph:
    return FakeGraph(lambda x: x, size)


PERMANENT = key(5, ANY_EPOCH)
KEYS = st.sampled_from([*(key(owner) for owner in range(5)), PERMANENT])
SIZES = st.integers(0, BUDGET + 2)


class AgainstANaiveModel(RuleBasedStateMachine):
    """Runs the same operations on a plain list; contents, order and evictions must agree after each."""

    def __init__(self) -> None:
        super().__init__()
        self.captures = Captures(BUDGET)
        self.kept: list[tuple[CaptureKey, FakeGraph]] = []  # oldest first
        self.made: list[FakeGraph] = []
        self.hits: dict[CaptureKey, int] = {}
        self.pinned: set[CaptureKey] = set()
        self.evictions = 0

    def drop(self, key: CaptureKey) -> None:
        self.kept = [entry for entry in self.kept if entry[0] != key]
        self.pinned.discard(key)

    def shrink(self, limit: int) -> int:
        freed = 0
        for each, kept in list(self.kept):
            if sum(one.bytes for _, one in self.kept) <= limit:
                break
            if each not in self.pinned | {PERMANENT}:
                freed += kept.bytes
                self.evictions += 1
                self.drop(each)
        return freed

    @rule(key=KEYS, size=SIZES)
    def put(self, key: CaptureKey, size: int) -> None:
        made = graph(size)
        self.drop(key)
        fits = size + sum(one.bytes for each, one in self.kept if each in self.pinned | {PERMANENT}) <= BUDGET
        assert self.captures.put(key, made, size) == fits
        if fits:
            self.shrink(BUDGET - size)
            self.kept.append((key, made))
            self.made.append(made)
            self.hits[key] = 0

    @rule(key=KEYS)
    def get(self, key: CaptureKey) -> None:
        found = next((entry for entry in self.kept if entry[0] == key), None)
        entry = self.captures.get(key)
        assert (entry and entry.value) is (found[1] if found else None)
        if found:
            self.hits[key] += 1
            self.kept.remove(found)
            self.kept.append(found)

    @rule(key=KEYS)
    def look_for(self, key: CaptureKey) -> None:
        assert (key in self.captures) == any(each == key for each, _ in self.kept)

    @rule(key=KEYS)
    def pin(self, key: CaptureKey) -> None:
        self.captures.open_session(key.owner)
        self.captures.pin_for_session(key)
        self.captures.pin_for_session(key)
        self.pinned |= {key} & {each for each, _ in self.kept}

    @rule(key=KEYS)
    def unpin(self, key: CaptureKey) -> None:
        self.captures.close_session(key.owner)
        self.captures.pin_for_session(key)
        self.pinned.discard(key)

    @rule(limit=SIZES)
    def trim(self, limit: int) -> None:
        assert self.captures.trim(limit) == self.shrink(limit)

    @rule(key=KEYS)
    def discard(self, key: CaptureKey) -> None:
        self.captures.discard(key)
        self.drop(key)

    @invariant()
    def contents_and_order_are_equal(self) -> None:
        assert [(each, entry.value, entry.bytes) for each, entry in self.captures] == [
            (each, kept, kept.bytes) for each, kept in self.kept
        ]
        assert [entry.hits for _, entry in self.captures] == [self.hits[each] for each, _ in self.kept]
        assert (len(self.captures), self.captures.evictions) == (len(self.kept), self.evictions)

    @invariant()
    def the_budget_holds(self) -> None:
        assert self.captures.bytes == sum(kept.bytes for _, kept in self.kept) <= BUDGET

    @invariant()
    def each_removed_one_was_closed_once(self) -> None:
        kept = [one for _, one in self.kept]
        assert [one.closed for one in self.made] == [int(one not in kept) for one in self.made]


TestAgainstANaiveModel = AgainstANaiveModel.TestCase
TestAgainstANaiveModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_discarded_capture_has_no_pin_when_it_comes_back() -> None:
    captures = Captures(BUDGET)
    captures.open_session(1)
    for _ in range(2):
        captures.put(key(1), graph(4), 4)
        captures.pin_for_session(key(1))
        assert captures.trim(0) == 0
        captures.discard(key(1))
    captures.put(key(1), graph(4), 4)
    assert captures.trim(0) == 4


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> Captures:
    """Its captures share 50 bytes."""
    monkeypatch.setattr(Captures, "shared_bytes", lambda self: 50)
    return Captures(100)


def test_what_captures_share_counts_once_and_goes_with_the_last(sharing: Any) -> None:
    assert sharing.bytes == 0
    sharing.put(key(1), graph(10), 10)
    sharing.put(key(2), graph(20), 20)
    assert sharing.bytes == 80
    assert sharing.trim(75) == 10
    assert key(2) in sharing
    assert sharing.trim(60) == 70, "less than the shared bytes means all"
    assert sharing.bytes == 0


def test_what_captures_share_evicts_none_to_make_room(sharing: Any) -> None:
    for owner in range(3):
        assert sharing.put(key(owner), graph(30), 30)
    assert len(sharing) == 3
    assert sharing.put(key(3), graph(40), 40)
    assert [each.owner for each, _ in sharing] == [1, 2, 3]
