"""The order of a streamed model's pages: each block streams about as much, and what no step needs has the last ones."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .fake_paging import Checkpoint


@pytest.fixture
def page_order(comfy: None, adapter: Callable[[str], ModuleType]) -> ModuleType:
    return adapter("dynamic_vram.page_order")


MIB = 1 << 20


def modules_of(sizes: list[int]) -> list[torch.nn.Module]:
    """Paged modules of so many MiB, one after the other."""
    made, start = [], 0
    for size in (MIB * each for each in sizes):
        module = torch.nn.Module()
        module.__dict__["_v"] = (None, start, size)
        start += size
        made.append(module)
    return made


def streamed(order: list[Any], room: int) -> dict[Any, int]:
    """MiB of each module that find no room, when what comes first in the order stays."""
    found, used = {}, 0
    for module in order:
        used += mib(module)
        found[module] = 0 if used <= room else mib(module)
    return found


def mib(module: Any) -> int:
    size: int = module._v[2]
    return size // MIB


def weight_of(modules: list[Any]) -> int:
    return sum(map(mib, modules))


LARGEST = 126


class TestOrder:
    @pytest.fixture
    def order_of(self, page_order: ModuleType) -> Any:
        return page_order.order_of

    def test_with_any_memory_blocks_of_two_kinds_stream_equally_much(self, order_of: Any) -> None:
        large = [modules_of([72, 72, 54, 18]) for _ in range(6)]
        small = [modules_of([LARGEST, 90]) for _ in range(12)]
        blocks = large + small
        modules = [module for block in blocks for module in block]
        order = order_of(modules, blocks, ())
        assert set(order) == set(modules)
        for room in range(0, weight_of(modules), 60):
            missing = streamed(order, room)
            found = [sum(missing[module] for module in block) for block in blocks]
            partly = [each for each, block in zip(found, blocks, strict=True) if each < weight_of(block)]
            assert not partly or max(found) - min(partly) <= LARGEST

    def test_what_no_step_needs_comes_last_and_what_is_outside_of_blocks_first(self, order_of: Any) -> None:
        outside, *blocks = modules_of([5]), *[modules_of([40, 20, 10]) for _ in range(3)]
        modules = [module for block in blocks for module in block] + outside
        unneeded = {block[0] for block in blocks}
        order = order_of(modules, blocks, unneeded)
        assert order[0] is outside[0]
        assert set(order[-3:]) == unneeded

    def test_small_modules_stay_before_any_large_one(self, order_of: Any) -> None:
        """Each costs the host as much as a large one."""
        blocks = [modules_of([26, 13, 3, 3, 5, 3]) for _ in range(4)] + [modules_of([6, 3, 1]) for _ in range(2)]
        modules = [module for block in blocks for module in block]
        order = order_of(modules, blocks, ())
        assert [mib(module) for module in order[-8:]] == [26] * 4 + [13] * 4
        missing = streamed(order, weight_of(modules) - 52)
        assert sum(map(bool, missing.values())) == 4

    def test_neighbours_do_not_follow_each_other(self, order_of: Any) -> None:
        blocks = [modules_of([10, 10]) for _ in range(8)]
        order = order_of([module for block in blocks for module in block], blocks, ())
        first_half = [number for number, block in enumerate(blocks) if block[0] in order[:4]]
        assert first_half == [0, 2, 4, 6]

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.data())
    def test_it_has_every_module_once(self, order_of: Any, data: st.DataObject) -> None:
        modules = modules_of(data.draw(st.lists(st.integers(1, 9), max_size=9)))
        of_blocks = st.lists(st.sampled_from(modules), max_size=3, unique=True) if modules else st.just([])
        blocks = data.draw(st.lists(of_blocks, max_size=4))  # they may share modules
        unneeded = set(data.draw(of_blocks))
        order = order_of(modules, blocks, unneeded)
        assert len(order) == len(modules)
        assert set(order) == set(modules)


class TestLayout:
    def news(self, weights: Any, checkpoint: Checkpoint) -> list[Any]:
        blocks: list[Any] = list(checkpoint.model.blocks)
        for block in blocks:
            weights.order.streams(block, [block])
        weights.mark_unneeded([blocks[1]])
        return blocks

    def addresses(self, blocks: list[Any]) -> list[int]:
        return [block._v[1] for block in blocks]

    def test_spared_weights_move_to_the_end_and_every_weight_is_right(
        self, weights: Any, checkpoint: Checkpoint
    ) -> None:
        assert weights.pin()
        weights.unpin()
        blocks = self.news(weights, checkpoint)
        before = self.addresses(blocks)
        weights.reorder_pages()
        assert weights.moved()  # so the epoch changes, and captures over the old addresses go
        assert self.addresses(blocks) != before
        assert max(self.addresses(blocks)) == blocks[1]._v[1]
        assert checkpoint.reservation.mapped == 0
        weights.survey(checkpoint.model.modules())
        assert weights.pin()
        with torch.inference_mode(), weights.in_place():
            x = torch.ones(1)
            assert torch.equal(checkpoint.model(x), checkpoint.expected(x))
        weights.unpin()

    def test_a_lora_is_there_afterwards(self, weights: Any, checkpoint: Checkpoint) -> None:
        self.news(weights, checkpoint)
        weights.reorder_pages()
        checkpoint.load("b")
        weights.survey(checkpoint.model.modules())
        assert weights.pin()
        with torch.inference_mode(), weights.in_place():
            x = torch.ones(1)
            assert torch.equal(checkpoint.model(x), checkpoint.expected(x))
        weights.unpin()

    def test_it_happens_once(self, weights: Any, checkpoint: Checkpoint) -> None:
        blocks = self.news(weights, checkpoint)
        weights.reorder_pages()
        asked, addresses = checkpoint.reservation.asked, self.addresses(blocks)
        self.news(weights, checkpoint)
        weights.reorder_pages()
        assert (checkpoint.reservation.asked, self.addresses(blocks)) == (asked, addresses)

    def test_nothing_moves_unless_a_block_was_split_or_many_small_modules_stream(
        self, weights: Any, checkpoint: Checkpoint
    ) -> None:
        blocks: list[Any] = list(checkpoint.model.blocks)
        for block in blocks:
            weights.order.streams(block, [block])
        before = self.addresses(blocks)
        weights.reorder_pages()
        assert self.addresses(blocks) == before
        weights.mark_unneeded([blocks[1]])
        weights.reorder_pages()
        assert self.addresses(blocks) != before

    @pytest.mark.parametrize(
        ("steps", "is_moved"),
        [([64, 64], True), ([64, 63, 64], False), ([64], False), ([63, 63, 63], False), ([1, 64, 0, 64, 64], True)],
    )
    def test_many_small_modules_in_two_steps_in_a_row(
        self, weights: Any, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, steps: list[int], is_moved: bool,
        page_order: ModuleType,
    ) -> None:  # fmt: skip
        """In its first step the whole model crosses the bus."""
        blocks: list[Any] = list(checkpoint.model.blocks)
        weights.order.streams(blocks[0], [blocks[0]])  # of them the only one in a block: it goes behind the others
        monkeypatch.setattr(page_order, "_LARGE", blocks[0]._v[2])
        before = self.addresses(blocks)
        for small in steps:
            for size in [1] * small + [8 * MIB] * 100:
                weights.order.count_streamed(size)
            weights.reorder_pages()
        assert (self.addresses(blocks) != before) is is_moved

    @pytest.mark.parametrize("why", ["pinned", "something else", "loaded ahead", "a hole", "a block's range"])
    def test_nothing_moves_if(self, weights: Any, checkpoint: Checkpoint, why: str) -> None:
        blocks = self.news(weights, checkpoint)
        if why == "pinned":
            checkpoint.reservation.fault(*blocks[0]._v[1:])
        elif why == "something else":
            checkpoint.reservation.alloc(600)
        elif why == "loaded ahead":
            blocks[2]._prefetch = {}
        elif why == "a block's range":
            checkpoint.model._v_block = (checkpoint.reservation, *blocks[0]._v[1:])
            weights.survey(checkpoint.model.modules())
        else:
            weights.survey([block for block in blocks if block is not blocks[2]])
            checkpoint.reservation.offset += 600
        before = self.addresses(blocks)
        weights.reorder_pages()
        assert self.addresses(blocks) == before
        assert not weights.moved()

    def test_modules_that_are_gone_are_forgotten(self, weights: Any, checkpoint: Checkpoint) -> None:
        blocks = self.news(weights, checkpoint)
        weights.survey(blocks[2:])
        assert not weights.order.is_unneeded(blocks[1])
        assert list(weights.order._blocks) == blocks[2:]
