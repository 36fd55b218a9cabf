"""A model whose weights stream is compiled by workers, and no weight is read after its block."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.backends.inductor.compiler import work
from compile_cache.backends.inductor.regions import region
from compile_cache.modules.site import Hook, RegionSite

from ..backends.inductor.compiler.behind_rig import Behind
from ..rig import Rig
from .conftest import CoreOperations
from .fake_paging import HOST, Checkpoint, PagedLinear

X = torch.arange(3.0)


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
    for name in ("dynamic_vram.page_loading", "dynamic_vram.aimdo"):
        monkeypatch.setattr(adapter(name), "comfy", package)


@pytest.fixture
def checkpoint(checkpoint: Checkpoint) -> Checkpoint:
    """A model that does not fit."""
    checkpoint.reservation.limit(3)
    return checkpoint


@pytest.fixture
def weights(paging: None, weights: Any) -> Any:
    return weights


@pytest.fixture
def streamed(adapter: Callable[[str], ModuleType], weights: Any) -> Callable[[Any], Any]:
    module = adapter("dynamic_vram.streamed_blocks")
    return lambda run: module.streamed(run, weights)


@pytest.fixture
def policy(adapter: Callable[[str], ModuleType]) -> Any:
    """The attributes beside settings that core keeps on its modules."""
    return adapter("comfyui.module_attributes").ATTRIBUTES


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
def test_workers_compile_it(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint, weights: Any, streamed: Callable[[Any], Any], policy: Any
) -> None:
    devices: list[str] = []
    real_trace = region.trace

    def noting(function: Any, module: Any, *given: Any) -> Any:
        devices.append(module.weight.device.type)
        return real_trace(function, module, *given)

    monkeypatch.setattr(region, "trace", noting)
    one = Rig(InductorBackend(), workers=2, attribute_policy=policy)
    bound = one.bind(checkpoint.model, hooks_over(checkpoint, streamed))
    try:
        with one.expect(region_compiles=5, verifications=5, region_calls=5, graph_calls=1, bypasses={}):
            assert torch.equal(bound(X, weights=weights), checkpoint.expected(X))
        compiled = [event.text for event in one.cache.stats.events if event.kind == "compile"]
        assert sorted(compiled) == [f"Block {n} ({n})" for n in range(5)], "each once, by a worker"
        assert devices == ["meta"] * 5, "of copies without weights"
        with one.expect(region_calls=5, graph_calls=1):
            assert torch.equal(bound(X, weights=weights), checkpoint.expected(X))
    finally:
        one.backend.workers.close()


def test_it_is_compiled_behind_the_picture(
    checkpoint: Checkpoint, weights: Any, streamed: Callable[[Any], Any], policy: Any
) -> None:
    rig = Behind(attribute_policy=policy)
    bound = rig.bind(checkpoint.model, hooks_over(checkpoint, streamed))

    def call() -> None:
        assert torch.equal(bound(X, weights=weights, background_compile=True), checkpoint.expected(X))

    with rig.expect(eager_calls=1, bypasses={}):
        call()
    rig.come()
    with rig.expect(region_compiles=5, verifications=5, region_calls=5, graph_calls=1):
        call()
    assert all(part.device.type == HOST for part in checkpoint.model.blocks.parameters())


def test_what_no_worker_can_get_is_compiled_by_the_call(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint, weights: Any, streamed: Callable[[Any], Any], policy: Any
) -> None:

    def refuse(*given: Any) -> Any:
        raise NotImplementedError("it cannot be sent")

    monkeypatch.setattr(work, "job_of", refuse)
    one = Rig(InductorBackend(), workers=2, attribute_policy=policy)
    bound = one.bind(checkpoint.model, hooks_over(checkpoint, streamed))
    try:
        with one.expect(region_compiles=5, verifications=5, region_calls=5, graph_calls=1):
            assert torch.equal(bound(X, weights=weights), checkpoint.expected(X))
        assert all(part.device.type == HOST for part in checkpoint.model.blocks.parameters())
    finally:
        one.backend.workers.close()
