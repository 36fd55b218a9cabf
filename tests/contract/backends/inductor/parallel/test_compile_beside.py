"""Regions of a module that comes later: their compiles begin beside those of the module that is called first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import torch

from compile_cache.backends.base import UpcomingDecode
from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.backends.inductor.parallel import pool, process
from compile_cache.backends.inductor.parallel.process import Compiled, NotCompiledError
from compile_cache.keys import Role
from compile_cache.regions.slots import swapped, tensor_slots

from .....programs import wait_for
from ....rig import TOLERANCE, Bound, Model, Rig, hooks_of, inputs, seeded


@pytest.fixture(autouse=True)
def stay(soon_idle: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "IDLE_SECONDS", 60.0)


class Later:
    """A module that is expected: it shares its convolutions with the first one, and has attentions of its own."""

    def __init__(self, rig: Rig) -> None:
        self.module = seeded(lambda: Model(eps=1e-3), seed=1)
        self.bound = rig.bind(self.module)
        self.looked_at: list[Sequence[int]] = []

    def as_loaded(self) -> contextlib.AbstractContextManager[None]:
        slots = [slot for part in self.module.modules() for slot in tensor_slots(part)]
        empty = [torch.empty_like(own[name], device="meta") for own, name in slots]
        return swapped((*slot, torch.nn.Parameter(each, False)) for slot, each in zip(slots, empty, strict=True))

    def invoke(self, shape: Sequence[int]) -> None:
        self.looked_at.append(shape)
        self.module(torch.empty(shape, device="meta"), torch.empty((shape[0], 7, 16), device="meta"))

    def announce(self, **changes: Any) -> None:
        decode = {"as_loaded": self.as_loaded, "invoke": self.invoke, **changes}
        with torch.inference_mode():
            self.bound.program.compile_ahead(UpcomingDecode(torch.device("cpu"), hooks_of(self.module), **decode))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(InductorBackend(), workers=2, store_folder=tmp_path, source="one")
    yield made
    workers_of(made).close()


def workers_of(rig: Rig) -> pool.WorkerPool:
    return rig.backend.workers  # type: ignore[attr-defined,no-any-return]


def traces(rig: Rig) -> list[str]:
    return [event.text for event in rig.cache.stats.events if event.kind == "trace"]


def first_call(rig: Rig) -> None:
    with rig.expect(region_compiles=2, verifications=2, region_calls=4, graph_calls=1):
        assert rig.bind(seeded(Model)).error(*inputs()) <= TOLERANCE


def test_what_only_the_later_module_needs_is_submitted_early_and_neither_traced_nor_compiled_again(
    rig: Rig,
) -> None:
    later = Later(rig)
    weights = {name: id(weight) for name, weight in later.module.named_parameters()}
    later.announce()
    first_call(rig)
    assert later.looked_at == [(2, 16, 8, 8)]
    assert {name: id(weight) for name, weight in later.module.named_parameters()} == weights
    assert traces(rig) == ["2 regions", "1 regions of a module that comes later"]
    assert len(workers_of(rig)._early) == 1
    with rig.expect(region_compiles=1, verifications=1, region_calls=4, graph_calls=1):
        assert later.bound.error(*inputs()) <= TOLERANCE
    assert traces(rig)[2:] == ["0 regions"]
    assert not workers_of(rig)._early
    with rig.expect(region_calls=4, graph_calls=1, verifications=ANY):
        assert later.bound.error(*inputs(1, 9, 5, 11)) <= TOLERANCE


def test_beside_weights_that_stream_it_is_not_looked_at(rig: Rig) -> None:
    """The memory of its jobs would be taken from them."""
    later, first = Later(rig), rig.bind(seeded(Model))
    later.announce()
    call: Any = SimpleNamespace(key=SimpleNamespace(role=Role.UNET), weights=SimpleNamespace(streams=True))
    assert first.program._take_upcoming(call) == {}
    assert list(first.program._upcoming_calls) == [later.bound.program.owner]


@pytest.mark.long
def test_a_result_that_came_before_the_processes_ended_is_used(rig: Rig) -> None:
    later = Later(rig)
    later.announce()
    first_call(rig)
    ((_, _, early),) = workers_of(rig)._early.values()
    wait_for(early.done)
    workers_of(rig).close()
    with rig.expect(region_compiles=1, verifications=1, region_calls=4, graph_calls=1):
        assert later.bound.error(*inputs()) <= TOLERANCE
    assert traces(rig)[2:] == ["0 regions"]


def lost(rig: Rig) -> None:
    ((key, (owner, settings, _)),) = workers_of(rig)._early.items()
    workers_of(rig).close()
    failed: Compiled = Future()  # in place of it, which may have a result already
    failed.set_exception(NotCompiledError("the processes that compile ended"))
    workers_of(rig)._early[key] = (owner, settings, failed)


def under_other_settings(rig: Rig) -> None:
    ((key, (owner, settings, job)),) = workers_of(rig)._early.items()
    workers_of(rig)._early[key] = (owner, {**settings, "environment": "another"}, job)


@pytest.mark.long
@pytest.mark.parametrize("change", [lost, under_other_settings])
def test_an_early_job_that_is_lost_is_compiled_by_the_call(rig: Rig, change: Callable[[Rig], None]) -> None:
    later = Later(rig)
    later.announce()
    first_call(rig)
    change(rig)
    with rig.expect(region_compiles=ANY, verifications=ANY, region_calls=4, graph_calls=1):
        assert later.bound.error(*inputs()) <= TOLERANCE
    assert rig.cache.stats.counters.compile_failures == 0


def fail(*_: Any) -> Any:
    raise ValueError("its weights are unknown")


@pytest.mark.long
@pytest.mark.parametrize("part", ["as_loaded", "invoke"])
def test_a_module_that_cannot_be_looked_at_costs_nothing(rig: Rig, part: str) -> None:
    later = Later(rig)
    later.announce(**{part: fail})
    first_call(rig)
    assert not workers_of(rig)._early
    with rig.expect(region_compiles=1, verifications=1, region_calls=4, graph_calls=1):
        assert later.bound.error(*inputs()) <= TOLERANCE


@pytest.mark.long
def test_what_is_stored_or_in_memory_is_not_submitted_early(rig: Rig, tmp_path: Path) -> None:
    Rig(InductorBackend(), workers=0, store_folder=tmp_path, source="one").bind(Later(rig).module)(*inputs())
    later = Later(rig)
    later.announce()
    first: Bound = rig.bind(seeded(lambda: Model(eps=1e-4)))
    with rig.expect(region_compiles=1, region_loads=1, verifications=1, region_calls=4, graph_calls=1):
        assert first.error(*inputs()) <= TOLERANCE
    assert not workers_of(rig)._early


@pytest.mark.long
def test_a_module_that_is_gone_needs_nothing(rig: Rig) -> None:
    later, other = Later(rig), Later(rig)
    later.announce()
    first_call(rig)
    other.bound.program.close()
    assert len(workers_of(rig)._early) == 1
    later.bound.program.close()
    assert not workers_of(rig)._early


def test_a_module_that_was_called_is_no_longer_expected() -> None:
    rig = Rig(InductorBackend(), workers=0)
    later = Later(rig)
    later.bound(*inputs())
    later.announce()
    assert not rig.backend.upcoming_calls  # type: ignore[attr-defined]
