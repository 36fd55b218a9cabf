"""A block that streams, split: its bits, the bytes over the bus, and the pages that it takes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from compile_cache.backends.inductor.compiler.compile_queue import CompileQueue
from compile_cache.backends.inductor.compiler.pool import WorkerPool
from compile_cache.backends.inductor.lower.environment import environment_of
from compile_cache.backends.inductor.regions.binding import RegionBinding
from compile_cache.backends.inductor.regions.miss_path import MissPolicy
from compile_cache.backends.inductor.regions.table import RegionTable
from compile_cache.config import CacheConfig
from compile_cache.errors import BypassReason
from compile_cache.modules.site import RegionSite, SilentProgress
from compile_cache.store.artifact_store import ArtifactStore
from compile_cache.telemetry.stats import Stats

from .conftest import CoreOperations
from .fake_paging import HOST, Checkpoint, PagedLinear, compute

_numbers = itertools.count()  # a trace serves all blocks of a structure in the process

SPARED = {"blocks.0", "blocks.1"}
REST = {"blocks.2", "blocks.3", "blocks.4"}


def block(model: Any, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """A modulation by the time, and keys of the text."""
    shift, scale = model.blocks[0](time), model.blocks[1](time)
    keys = model.blocks[2](text).sum(1, keepdim=True)
    result: torch.Tensor = model.blocks[4](model.blocks[3](x) * scale + shift + keys)
    return result


def expected(checkpoint: Checkpoint, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    assert checkpoint.lora is not None

    def run(number: int, tensor: torch.Tensor) -> torch.Tensor:
        name, lora = f"blocks.{number}", checkpoint.lora or ""
        bias = checkpoint.value(name, "bias", lora) if number % 2 == 0 else None
        return compute(tensor, checkpoint.value(name, "weight", lora), bias)

    keys = run(2, text).sum(1, keepdim=True)
    return run(4, run(3, x) * run(1, time) + run(0, time) + keys)


def inputs(level: float, prompt: float, batch: int = 1, length: int = 5) -> tuple[torch.Tensor, ...]:
    return torch.ones(batch, length) * 3, torch.full((batch, 1), level), torch.full((batch, 4), prompt)


@pytest.fixture
def checkpoint(checkpoint: Checkpoint) -> Checkpoint:
    """Memory has room for less than all."""
    checkpoint.reservation.limit(3)
    return checkpoint


@pytest.fixture
def faulted(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The modules whose pages are asked for."""
    names = {part._v[1]: name for name, part in checkpoint.model.named_modules() if isinstance(part, PagedLinear)}  # type: ignore[attr-defined]
    found: list[str] = []
    fault = checkpoint.reservation.fault

    def noting(address: int, size: int) -> Any:
        found.append(names.get(address, "several"))
        return fault(address, size)

    monkeypatch.setattr(checkpoint.reservation, "fault", noting)
    yield found


class Streamed:
    """The block through `streamed`, by the operators of its parts."""

    def __init__(
        self, streamed_blocks: ModuleType, weights: Any, checkpoint: Checkpoint, run: Any = None, structure: str = ""
    ) -> None:
        self.weights, self.checkpoint = weights, checkpoint
        self.ran: list[str] = []
        dims = (("b", "n"), ("b", None), ("b", "m"))
        structure = structure or f"of test {next(_numbers)}"
        self.site = RegionSite("blocks", "Block", checkpoint.model, block, dims, structure=structure, times=(1,))
        self._run = streamed_blocks.streamed(run or self._eager, weights)

    def _eager(self, site: Any, *tensors: torch.Tensor) -> Any:
        self.ran.append(site.kind)
        return site.function(site.module, *tensors)

    def step(self, *tensors: torch.Tensor) -> torch.Tensor:
        self.ran.clear()
        self.checkpoint.moved.clear()
        with torch.inference_mode():
            result: torch.Tensor = self._run(self.site, *tensors)
        return result


@pytest.fixture
def streamed(streamed_blocks: ModuleType, weights: Any, checkpoint: Checkpoint) -> Streamed:
    return Streamed(streamed_blocks, weights, checkpoint)


def test_every_call_gives_the_bits_of_the_whole_block(streamed: Streamed, checkpoint: Checkpoint) -> None:
    for lora in ("a", "", "b"):
        checkpoint.load(lora)
        streamed.weights.loaded()
        checkpoint.reservation.limit(3)
        for level in (9.0, 7.0, 4.0, 7.0):
            for prompt in (1.0, 2.0):
                for batch, length in ((1, 5), (2, 1), (3, 8)):
                    given = inputs(level, prompt, batch, length)
                    assert torch.equal(streamed.step(*given), expected(checkpoint, *given))
                    assert streamed.ran[-1] == "Block.rest"
    assert streamed.weights.counters.prologue_runs == 3 * 3 * 3
    assert all(each.device.type == HOST for each in checkpoint.model.blocks.parameters())


def test_a_known_step_moves_no_byte_of_what_it_does_not_need(streamed: Streamed, checkpoint: Checkpoint) -> None:
    checkpoint.reservation.limit(0)
    streamed.step(*inputs(9.0, 1.0))
    assert checkpoint.moved.keys() == SPARED | REST
    streamed.step(*inputs(9.0, 1.0))
    assert checkpoint.moved.keys() == REST
    assert streamed.ran == ["Block.rest"]
    streamed.step(*inputs(7.0, 1.0))
    assert checkpoint.moved.keys() == REST | {"blocks.0", "blocks.1"}
    streamed.step(*inputs(7.0, 2.0))
    assert checkpoint.moved.keys() == REST


def counting(model: Any, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    return block(model, x, time, text) * next(_numbers)


def modulated_by_all(model: Any, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    shared: torch.Tensor = model.blocks[0](time) + model.blocks[0](x)
    return shared


@pytest.mark.parametrize("function", [counting, modulated_by_all])
def test_a_block_whose_parts_give_other_bits_or_spare_nothing_stays_whole(streamed: Streamed, function: Any) -> None:
    streamed.site = dataclasses.replace(streamed.site, function=function)
    for _ in range(2):
        streamed.step(*inputs(9.0, 1.0))
        assert streamed.ran == ["Block"]
    assert streamed.weights.counters.prologue_runs == 0


def test_what_no_step_needs_takes_no_page(streamed: Streamed, checkpoint: Checkpoint, faulted: list[str]) -> None:
    for level in (9.0, 7.0, 9.0):
        streamed.step(*inputs(level, 1.0))
    assert faulted
    assert not SPARED & set(faulted)


def test_resident_weights_of_a_prologue_are_used_where_they_are(streamed: Streamed, checkpoint: Checkpoint) -> None:
    checkpoint.reservation.limit(16)
    assert streamed.weights.pin()
    streamed.weights.unpin()
    given = inputs(9.0, 1.0)
    assert torch.equal(streamed.step(*given), expected(checkpoint, *given))
    assert sum(checkpoint.moved.values()) == 0
    assert not any(checkpoint.reservation.pins)


def test_others_get_pages_before_spared_ones(streamed: Streamed, checkpoint: Checkpoint) -> None:
    streamed.step(*inputs(9.0, 1.0))
    checkpoint.reservation.evict(16)
    checkpoint.reservation.prioritize()
    assert not streamed.weights.pin()
    streamed.step(*inputs(9.0, 1.0))
    streamed.step(*inputs(9.0, 1.0))
    assert sum(checkpoint.moved.values()) == 0, "the rest fits, and was filled"


def test_a_model_that_fits_runs_whole(streamed: Streamed, checkpoint: Checkpoint) -> None:
    streamed.step(*inputs(9.0, 1.0))
    checkpoint.reservation.limit(16)
    streamed.weights.loaded()
    checkpoint.reservation.prioritize()
    assert streamed.weights.pin()
    given = inputs(7.0, 1.0)
    with streamed.weights.in_place():
        assert torch.equal(streamed.step(*given), expected(checkpoint, *given))
    assert streamed.ran == ["Block"]
    streamed.weights.unpin()


@pytest.mark.parametrize("seen", [False, True])
def test_an_error_while_loading_puts_everything_back(
    streamed: Streamed, checkpoint: Checkpoint, core: CoreOperations, seen: bool
) -> None:
    if seen:
        streamed.step(*inputs(9.0, 1.0))
    core.failure = InterruptedError("cancelled")
    with pytest.raises(InterruptedError):
        streamed.step(*inputs(7.0, 1.0))
    core.failure = None
    assert not any(checkpoint.reservation.pins)
    assert all(part._v[0] is checkpoint.reservation for part in checkpoint.model.blocks)  # type: ignore[union-attr]
    given = inputs(7.0, 1.0)
    assert torch.equal(streamed.step(*given), expected(checkpoint, *given))


def test_a_split_block_compiles_one_region_which_serves_every_size_and_the_next_process(
    streamed_blocks: ModuleType,
    weights: Any,
    checkpoint: Checkpoint,
    tmp_path: Path,
    adapter: Callable[[str], ModuleType],
) -> None:
    reasons: list[BypassReason] = []
    config = CacheConfig(attribute_policy=adapter("comfyui.module_attributes").ATTRIBUTES)
    store = ArtifactStore(tmp_path, environment_of(torch.device("cpu"), "one"), 1 << 30)
    name = f"of test {next(_numbers)}"

    def run(stats: Stats) -> RegionBinding:
        """The calls of a process, whose table of regions is empty."""
        table = RegionTable()
        queue = CompileQueue(table, WorkerPool())
        queue.begin(CacheConfig(workers=0), is_decoder=False)
        regions = RegionBinding(table, lambda device: store, reasons.append, stats, config, queue)
        regions.begin(SilentProgress(), (), MissPolicy.COMPILE)
        weights.kept.forget()
        streamed = Streamed(streamed_blocks, weights, checkpoint, regions.run, name)
        for level, batch, length in [(9.0, 2, 5), (9.0, 2, 5), (7.0, 3, 8)]:
            given = inputs(level, 1.0, batch, length)
            assert torch.equal(streamed.step(*given), expected(checkpoint, *given))
        assert stats.counters.region_calls == 3
        assert not reasons
        return regions

    first, second = Stats(), Stats()
    assert run(first).compiled_count == (1, 1)
    run(second)
    assert (first.counters.region_compiles, second.counters.region_compiles, second.counters.region_loads) == (1, 0, 1)
