"""A model whose weights stream is compiled by workers: they get memory, and no weight is read after its block."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.backends.inductor.parallel import compile_queue, pool
from compile_cache.backends.inductor.regions import region
from compile_cache.regions.site import Hook, RegionSite

from ..rig import Rig
from .conftest import CoreOperations
from .fake_paging import HOST, PAGE, Checkpoint, PagedLinear, Reservation

X = torch.arange(3.0)
ROOM_FOR_PAGES = 1  # of the model's four


class OneBuffer(CoreOperations):
    """A weight without a page comes through a buffer that the next load overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self._buffer: list[torch.Tensor] = []

    def cast_modules_with_vbar(self, modules: Any, *given: Any) -> Any:
        for tensor in self._buffer:
            tensor.fill_(torch.nan)
        self._buffer.clear()
        return super().cast_modules_with_vbar(modules, *given)

    def resolve_cast_module_with_vbar(self, module: Any, *given: Any) -> Any:
        found = super().resolve_cast_module_with_vbar(module, *given)
        if module._prefetch["signature"] is None:
            self._buffer += [tensor for tensor in found if tensor is not None]
        return found


@pytest.fixture
def core() -> CoreOperations:
    return OneBuffer()


@pytest.fixture
def paging(
    comfy: None, core: CoreOperations, adapter: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = sys.modules["comfy"]
    loaded: list[Any] = []
    management = SimpleNamespace(
        sync_stream=lambda device, stream: None, current_stream=lambda device: None, current_loaded_models=loaded
    )
    monkeypatch.setattr(package, "ops", core)
    monkeypatch.setattr(package, "model_management", management)
    for name in ("ops", "model_management"):
        monkeypatch.setitem(sys.modules, f"comfy.{name}", getattr(package, name))
    for name in ("comfyui.page_loading", "comfyui.dynamic_vram"):
        monkeypatch.setattr(adapter(name), "comfy", package)


def has_loaded(reservation: Reservation) -> None:
    """ComfyUI has loaded a model with this reservation."""
    model = SimpleNamespace(dynamic_vbars={torch.device("cuda", 0): reservation})
    sys.modules["comfy"].model_management.current_loaded_models.append(
        SimpleNamespace(model=SimpleNamespace(model=model))
    )


def free_is(monkeypatch: pytest.MonkeyPatch, size: Callable[[], int]) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (size(), 140 << 30))


@pytest.fixture
def checkpoint(checkpoint: Checkpoint) -> Checkpoint:
    """A model that does not fit."""
    checkpoint.reservation.limit(3)
    return checkpoint


@pytest.fixture
def weights(paging: None, weights: Any, checkpoint: Checkpoint) -> Any:
    has_loaded(checkpoint.reservation)
    return weights


@pytest.fixture
def streamed(adapter: Callable[[str], ModuleType], weights: Any) -> Callable[[Any], Any]:
    module = adapter("weights.streamed_blocks")
    return lambda run: module.streamed(run, weights)


def hooks_over(checkpoint: Checkpoint, streamed: Callable[[Any], Any]) -> Any:
    """A region for each block."""

    def build(run: Any, bypass: Any) -> Sequence[Hook]:
        through, found = streamed(run), []
        for name, block in checkpoint.model.blocks.named_children():
            site = RegionSite(name, f"Block {name}", block, PagedLinear.forward, (("n",),))
            found.append(Hook(block, lambda x, site=site: through(site, x), (site,)))
        return found

    return build


@pytest.mark.long
def test_workers_compile_it_and_get_memory_meanwhile(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint, weights: Any, streamed: Callable[[Any], Any]
) -> None:
    reservation = checkpoint.reservation
    # Beside the workers and the prompt there is room for some pages, and only of this model.
    free_is(monkeypatch, lambda: pool.room_for(2) + (ROOM_FOR_PAGES - reservation.mapped) * PAGE)
    most_mapped: list[int] = []
    devices: list[str] = []
    real_in_use, real_trace = pool.WorkerPool.in_use, region.trace

    def in_use(*given: Any) -> Any:
        most_mapped.append(reservation.mapped)
        return real_in_use(*given)

    def noting(function: Any, module: Any, *given: Any) -> Any:
        devices.append(module.weight.device.type)
        return real_trace(function, module, *given)

    monkeypatch.setattr(pool.WorkerPool, "in_use", in_use)
    monkeypatch.setattr(region, "trace", noting)
    one = Rig(InductorBackend(), workers=2)
    bound = one.bind(checkpoint.model, hooks_over(checkpoint, streamed))
    try:
        with one.expect(region_compiles=5, verifications=5, region_calls=5, graph_calls=1, bypasses={}):
            assert torch.equal(bound(X, weights=weights), checkpoint.expected(X))
        compiled = [event.text for event in one.cache.stats.events if event.kind == "compile"]
        assert sorted(compiled) == [f"Block {n} ({n})" for n in range(5)], "each once, by a worker"
        assert most_mapped == [ROOM_FOR_PAGES]
        assert devices == ["meta"] * 5, "of copies without weights"
        assert reservation.watermark == reservation.pages, "afterwards the model gets the memory back"
        assert not bound.program._workers.running
        with one.expect(region_calls=5, graph_calls=1):
            assert torch.equal(bound(X, weights=weights), checkpoint.expected(X))
        assert reservation.mapped > ROOM_FOR_PAGES
    finally:
        bound.program._workers.close()


@pytest.mark.parametrize(("has_watermark", "mapped"), [(True, (0, 3)), (False, (0, 3))])
def test_pages_of_other_models_go_first(
    monkeypatch: pytest.MonkeyPatch, weights: Any, checkpoint: Checkpoint, has_watermark: bool, mapped: tuple[int, int]
) -> None:
    own, other = checkpoint.reservation, Reservation(4)
    has_loaded(other)
    own.limit(5)
    free_is(monkeypatch, lambda: (9 - own.mapped - other.mapped) * PAGE)
    if not has_watermark:  # comfy-aimdo 0.3
        monkeypatch.delattr(Reservation, "set_watermark")
    for reservation, count in ((own, 5), (other, 4)):
        start = reservation.base_addr
        assert reservation.fault(start, count * PAGE) is not None
        reservation.unpin(start, count * PAGE)
    with weights.room(6 * PAGE):
        assert (other.mapped, own.mapped) == mapped
        assert (own.fault(own.base_addr, 4 * PAGE) is None) == has_watermark or own.watermark <= 3
    assert own.watermark == own.pages


def test_weights_that_are_in_place_stay_and_others_go(
    monkeypatch: pytest.MonkeyPatch, weights: Any, checkpoint: Checkpoint
) -> None:
    own, other = checkpoint.reservation, Reservation(4)
    has_loaded(other)
    own.limit(16)
    assert weights.pin()
    assert other.fault(other.base_addr, 4 * PAGE) is not None
    other.unpin(other.base_addr, 4 * PAGE)
    mapped = own.mapped
    free_is(monkeypatch, lambda: (16 - own.mapped - other.mapped) * PAGE)
    with weights.in_place():
        assert weights.reclaimable() == 4 * PAGE
        with weights.room((16 - mapped - 1) * PAGE) as gives:
            assert (gives, own.mapped, other.mapped) == (True, mapped, 1)
        with weights.room(PAGE) as gives:
            assert (gives, own.mapped, other.mapped) == (False, mapped, 1)
    assert own.watermark == own.pages
    weights.unpin()


def test_what_cannot_be_traced_is_compiled_by_the_call(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint, weights: Any, streamed: Callable[[Any], Any]
) -> None:
    free_is(monkeypatch, lambda: 1 << 40)

    def refuse(call: Any, *given: Any) -> Any:
        raise NotImplementedError("no such operator")

    monkeypatch.setattr(compile_queue, "trace_of", refuse)
    one = Rig(InductorBackend(), workers=2)
    bound = one.bind(checkpoint.model, hooks_over(checkpoint, streamed))
    try:
        with one.expect(region_compiles=5, verifications=5, region_calls=5, graph_calls=1):
            assert torch.equal(bound(X, weights=weights), checkpoint.expected(X))
        assert all(part.device.type == HOST for part in checkpoint.model.blocks.parameters())
    finally:
        bound.program._workers.close()
