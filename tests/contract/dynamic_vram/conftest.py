"""Loading of paged weights over a fake DynamicVRAM."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from .fake_paging import Checkpoint, fill, uncaptured


class CoreOperations:
    """`comfy.ops` in small."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.asked: list[Any] = []  # modules that were to be loaded

    def cast_modules_with_vbar(self, modules: Any, dtype: Any, device: Any, bias_dtype: Any, non_blocking: bool) -> Any:
        for module in modules:
            reservation, address, size = module._v
            signature = reservation.fault(address, size)
            resident = signature is not None and signature == module._v_signature
            module._prefetch = {"signature": signature, "resident": resident}
            self.asked.append(module)

    def cast_bias_weight(self, module: Any, **_: Any) -> Any: ...

    def uncast_bias_weight(self, *_: Any) -> None: ...

    def resolve_cast_module_with_vbar(self, module: Any, dtype: Any, *_: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        weight, bias = uncaptured(module)
        if module._prefetch["signature"] is None:
            return weight, bias
        module._prefetch["resident"] = True
        return module._v_weight, module._v_bias


@pytest.fixture
def core(comfy: None, monkeypatch: pytest.MonkeyPatch) -> CoreOperations:
    core = CoreOperations()
    package = sys.modules["comfy"]
    monkeypatch.setattr(package, "ops", core)
    monkeypatch.setitem(sys.modules, "comfy.ops", core)
    management = SimpleNamespace(sync_stream=lambda device, stream: None, current_stream=lambda device: None)
    monkeypatch.setattr(package, "model_management", management)
    monkeypatch.setitem(sys.modules, "comfy.model_management", management)
    return core


@pytest.fixture
def checkpoint() -> Checkpoint:
    checkpoint = Checkpoint()
    checkpoint.load("a")
    return checkpoint


@pytest.fixture
def weights(comfy: None, adapter: Callable[[str], ModuleType], checkpoint: Checkpoint) -> Any:
    weights = adapter("dynamic_vram.paged_weights").PagedWeights(fill)
    weights.survey(checkpoint.model.modules())
    return weights


@pytest.fixture
def streamed_blocks(
    core: CoreOperations, adapter: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    loading = adapter("dynamic_vram.page_loading")  # another test may have imported it with another `comfy`
    monkeypatch.setattr(loading, "comfy", sys.modules["comfy"])
    return adapter("dynamic_vram.streamed_blocks")
