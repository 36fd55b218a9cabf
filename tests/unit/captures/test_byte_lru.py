"""ByteLRU: limited by bytes, evicts the oldest first, keeps pinned entries, closes each value once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from compile_cache.captures.byte_lru import ByteLRU

BUDGET = 10


@pytest.fixture
def evicted() -> list[str]:
    return []


@pytest.fixture
def cache(evicted: list[str]) -> ByteLRU[str, str]:
    return ByteLRU(BUDGET, evicted.append)


def keys(cache: ByteLRU[str, str]) -> list[str]:
    return [key for key, _ in cache]


def test_a_value_is_found_and_its_hits_are_counted(cache: ByteLRU[str, str]) -> None:
    cache.put("a", "A", 4)
    assert cache.get("a") == "A"
    assert cache.get("a") == "A"
    assert next(iter(cache))[1].hits == 2
    assert cache.get("b") is None


def test_the_oldest_is_evicted_first(cache: ByteLRU[str, str], evicted: list[str]) -> None:
    for name in "abc":
        cache.put(name, name.upper(), 4)
    assert evicted == ["A"]
    assert keys(cache) == ["b", "c"]


@pytest.mark.parametrize(("use", "gone"), [(ByteLRU.get, "B"), (ByteLRU.__contains__, "A")], ids=["get", "in"])
def test_getting_a_value_makes_it_the_newest_and_looking_for_its_key_does_not(
    cache: ByteLRU[str, str], evicted: list[str], use: Any, gone: str
) -> None:
    cache.put("a", "A", 4)
    cache.put("b", "B", 4)
    assert use(cache, "a")
    cache.put("c", "C", 4)
    assert evicted == [gone]


def test_no_more_is_evicted_than_necessary(cache: ByteLRU[str, str], evicted: list[str]) -> None:
    for name, size in (("a", 2), ("b", 5), ("c", 3)):
        cache.put(name, name, size)
    cache.put("d", "d", 2)
    assert evicted == ["a"]
    assert cache.bytes == BUDGET


def test_a_value_over_the_budget_is_refused_and_evicts_nothing(cache: ByteLRU[str, str], evicted: list[str]) -> None:
    cache.put("a", "A", 4)
    assert not cache.put("b", "B", BUDGET + 1)
    assert keys(cache) == ["a"]
    assert evicted == []


def test_a_value_that_exactly_fills_the_budget_is_kept(cache: ByteLRU[str, str]) -> None:
    assert cache.put("a", "A", BUDGET)
    assert cache.bytes == BUDGET


def test_a_value_that_cannot_fit_next_to_pinned_ones_is_refused_and_evicts_nothing(
    cache: ByteLRU[str, str], evicted: list[str]
) -> None:
    cache.put("a", "A", 6)
    cache.put("b", "B", 2)
    cache.pin("a")
    assert not cache.put("c", "C", 5)
    assert keys(cache) == ["a", "b"]
    assert evicted == []


def test_a_pinned_entry_is_kept_even_if_it_is_the_oldest(cache: ByteLRU[str, str], evicted: list[str]) -> None:
    cache.put("a", "A", 4)
    cache.put("b", "B", 4)
    cache.pin("a")
    cache.put("c", "C", 4)
    assert evicted == ["B"]
    assert cache.trim(0) == 4
    assert keys(cache) == ["a"]


def test_pins_are_counted(cache: ByteLRU[str, str]) -> None:
    cache.put("a", "A", 4)
    cache.pin("a")
    cache.pin("a")
    cache.unpin("a")
    assert cache.trim(0) == 0
    cache.unpin("a")
    assert cache.trim(0) == 4


def test_a_discarded_key_has_no_pin_when_it_comes_back(cache: ByteLRU[str, str]) -> None:
    cache.put("a", "A", 4)
    cache.pin("a")
    cache.discard("a")
    cache.put("a", "new", 4)
    assert cache.trim(0) == 4


def test_an_extra_unpin_does_not_cancel_a_later_pin(cache: ByteLRU[str, str]) -> None:
    cache.put("a", "A", 4)
    cache.unpin("a")
    cache.pin("a")
    assert cache.trim(0) == 0


def test_a_replaced_value_is_closed(cache: ByteLRU[str, str], evicted: list[str]) -> None:
    cache.put("a", "old", 4)
    cache.put("a", "new", 6)
    assert evicted == ["old"]
    assert cache.bytes == 6


def test_trim_evicts_down_to_the_limit_and_returns_freed_bytes(cache: ByteLRU[str, str], evicted: list[str]) -> None:
    for name in "abc":
        cache.put(name, name, 3)
    assert cache.trim(5) == 6
    assert evicted == ["a", "b"]
    assert cache.evictions == 2


def test_discarding_a_missing_key_does_nothing(cache: ByteLRU[str, str], evicted: list[str]) -> None:
    cache.discard("a")
    assert evicted == []


def test_entries_may_be_discarded_during_iteration(cache: ByteLRU[str, str]) -> None:
    for name in "abc":
        cache.put(name, name, 1)
    for key, _ in cache:
        cache.discard(key)
    assert len(cache) == 0


def test_a_cache_without_an_eviction_callback_evicts_too() -> None:
    cache: ByteLRU[str, str] = ByteLRU(4)
    cache.put("a", "A", 4)
    cache.put("b", "B", 4)
    assert keys(cache) == ["b"]


NAMES = st.sampled_from("abcde")
SIZES = st.integers(0, BUDGET + 2)


class AgainstANaiveModel(RuleBasedStateMachine):
    """Runs the same operations on a plain list; contents, order and evictions must agree after each."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.cache: ByteLRU[str, int] = ByteLRU(BUDGET, self.evicted.append)
        self.kept: list[tuple[str, int, int]] = []  # key, value, size; oldest first
        self.left: list[int] = []
        self.pins: Counter[str] = Counter()
        self.made = 0
        self.refused = 0

    def drop(self, key: str) -> None:
        self.left += [value for name, value, _ in self.kept if name == key]
        self.kept = [entry for entry in self.kept if entry[0] != key]
        self.pins.pop(key, None)

    def shrink(self, limit: int) -> int:
        freed = 0
        for name, _, size in list(self.kept):
            if sum(entry[2] for entry in self.kept) <= limit:
                break
            if self.pins[name] == 0:
                freed += size
                self.drop(name)
        return freed

    @rule(key=NAMES, size=SIZES)
    def put(self, key: str, size: int) -> None:
        value = self.made = self.made + 1
        self.drop(key)
        fits = size + sum(entry[2] for entry in self.kept if self.pins[entry[0]]) <= BUDGET
        assert self.cache.put(key, value, size) == fits
        if fits:
            self.shrink(BUDGET - size)
            self.kept.append((key, value, size))
        else:
            self.refused += 1

    @rule(key=NAMES)
    def get(self, key: str) -> None:
        found = next((entry for entry in self.kept if entry[0] == key), None)
        assert self.cache.get(key) == (found[1] if found else None)
        if found:
            self.kept.remove(found)
            self.kept.append(found)

    @rule(key=NAMES)
    def pin(self, key: str) -> None:
        self.cache.pin(key)
        self.pins[key] += 1

    @rule(key=NAMES)
    def unpin(self, key: str) -> None:
        self.cache.unpin(key)
        self.pins[key] = max(0, self.pins[key] - 1)

    @rule(limit=SIZES)
    def trim(self, limit: int) -> None:
        assert self.cache.trim(limit) == self.shrink(limit)

    @rule(key=NAMES)
    def discard(self, key: str) -> None:
        self.cache.discard(key)
        self.drop(key)

    @invariant()
    def contents_and_order_are_equal(self) -> None:
        assert [(key, entry.value, entry.bytes) for key, entry in self.cache] == self.kept

    @invariant()
    def the_budget_holds(self) -> None:
        assert self.cache.bytes == sum(size for _, _, size in self.kept) <= BUDGET

    @invariant()
    def each_removed_value_was_closed_once(self) -> None:
        assert self.evicted == self.left
        assert len(set(self.evicted)) == len(self.evicted)
        assert len(self.evicted) + len(self.kept) + self.refused == self.made


TestAgainstANaiveModel = AgainstANaiveModel.TestCase
TestAgainstANaiveModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class Sharing(ByteLRU[str, str]):
    """Its entries share 50 bytes."""

    def shared_bytes(self) -> int:
        return 50


def test_what_entries_share_counts_once_and_goes_with_the_last() -> None:
    cache = Sharing(100)
    assert cache.bytes == 0
    cache.put("a", "A", 10)
    cache.put("b", "B", 20)
    assert cache.bytes == 80
    assert cache.trim(75) == 10
    assert "b" in cache
    assert cache.trim(60) == 70, "less than the shared bytes means all"
    assert cache.bytes == 0


def test_what_entries_share_evicts_none_to_make_room() -> None:
    cache = Sharing(100)
    for name in "abc":
        assert cache.put(name, name, 30)
    assert len(cache) == 3
    assert cache.put("d", "d", 40)
    assert keys(cache) == ["b", "c", "d"]
