"""ComfyUI asks for the memory of captures when it needs memory, and when models are unloaded."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

CPU = torch.device("cpu")
MIB = 1 << 20


@pytest.fixture
def management(core: SimpleNamespace) -> Iterator[Any]:
    management = core.comfy.model_management
    before = list(management.current_loaded_models)
    management.current_loaded_models.clear()
    yield management
    management.current_loaded_models[:] = before


@pytest.fixture
def asked() -> list[bool]:
    return []


@pytest.fixture
def holder(core: SimpleNamespace, management: Any, asked: list[bool]) -> Any:
    made = core.ours("comfyui.memory_holder").MemoryHolder(CPU, lambda: 100 * MIB, asked.append)
    made.register()
    made.register()
    return made


@pytest.fixture
def captured(core: SimpleNamespace, management: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[bool]]:
    """`captured(cpu=bytes)`: the process holds captures of that size. Returns what was given back of them."""
    runtime = core.ours("process.runtime")

    def hold(**held: int) -> list[bool]:
        freed: list[bool] = []
        cache = SimpleNamespace(bytes_by_device=lambda: held, give_back=freed.append)
        monkeypatch.setattr(runtime, "_cache", cache)
        monkeypatch.setattr(runtime, "_holders", {})
        runtime._show_memory()
        runtime._show_memory()
        return freed

    return hold


def names(management: Any) -> list[str]:
    return [type(loaded.model.model).__name__ for loaded in management.current_loaded_models]


def test_it_is_among_the_loaded_models_once(holder: Any, management: Any) -> None:
    assert names(management) == ["CapturedGraphs"]
    assert holder.model_size() == 100 * MIB


def test_unload_models_asks_for_everything_and_the_next_capture_shows_it_again(
    holder: Any, management: Any, asked: list[bool]
) -> None:
    management.unload_all_models()
    assert asked == [True]
    assert names(management) == []
    holder.register()
    assert names(management) == ["CapturedGraphs"]


def test_a_model_that_needs_memory_asks_for_a_part(holder: Any, management: Any, asked: list[bool]) -> None:
    management.free_memory(management.get_free_memory(CPU) + 64 * MIB, CPU)
    assert asked == [False]
    assert names(management) == ["CapturedGraphs"]


def test_models_beside_it_load_and_unload_as_before(core: SimpleNamespace, holder: Any, management: Any) -> None:
    model = nn.Linear(2, 2)
    patcher = core.comfy.model_patcher.ModelPatcher(model, CPU, CPU)
    management.load_models_gpu([patcher])
    assert sorted(names(management)) == ["CapturedGraphs", "Linear"]
    management.unload_all_models()
    assert names(management) == []
    del patcher, model
    gc.collect()
    management.cleanup_models()


def test_the_process_shows_it_after_a_capture(management: Any, captured: Any) -> None:
    freed = captured(cpu=3 * MIB)
    assert [loaded.model.model_size() for loaded in management.current_loaded_models] == [3 * MIB]
    management.unload_all_models()
    assert freed == [True]


def test_each_device_is_asked_for_its_own_captures(
    management: Any, captured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {"cpu": MIB, "meta": 5 * MIB}  # the second stands for another GPU
    freed = captured(**held)
    monkeypatch.setattr(management, "get_free_memory", lambda *_, torch_free_too=False: (0, 0) if torch_free_too else 0)
    monkeypatch.setattr(management, "soft_empty_cache", lambda *_, **__: None)
    assert {str(loaded.device): loaded.model.model_size() for loaded in management.current_loaded_models} == held
    management.free_memory(MIB, torch.device("meta"))
    assert freed == [False]


def test_a_capture_leaves_free_what_dynamic_vram_takes_as_a_lack(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    dynamic_vram = core.ours("dynamic_vram.aimdo")
    assert dynamic_vram.headroom() == 0, "it is off on the CPU"
    monkeypatch.setattr(core.comfy.memory_management, "aimdo_enabled", True)
    assert dynamic_vram.headroom() == 256 * MIB
    monkeypatch.setattr(core.comfy.cli_args.args, "vram_headroom", 1.5)
    assert dynamic_vram.headroom() == (256 + 1536) * MIB


def test_a_core_whose_loaded_models_are_others_costs_no_picture(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime, holders = core.ours("process.runtime"), core.ours("comfyui.memory_holder")
    cache = runtime.cache()
    monkeypatch.setattr(cache, "bytes_by_device", lambda: {"cpu": 0})
    monkeypatch.setattr(runtime, "_holders", {})
    monkeypatch.setattr(holders, "MemoryHolder", lambda *_: 1 / 0)
    monkeypatch.setattr(cache, "after_capture", cache.after_capture)
    cache.after_capture()
    cache.after_capture()
    assert [record.levelname for record in caplog.records if "cannot ask for the memory" in record.message] == [
        "WARNING"
    ]


def test_the_button_free_compares_decodes_again_and_the_node_does_not(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, compared = core.ours("patch.free_captures"), list[str]()
    monkeypatch.setattr(memory, "broadcast", lambda *given, **more: None)
    compiled_vs_eager = core.ours("process.runtime").cache().compiled_vs_eager
    monkeypatch.setattr(compiled_vs_eager, "measure_again", lambda: compared.append("again"))
    memory.free_graphs()  # as the node does, in each prompt
    assert compared == []
    idle = SimpleNamespace(mutex=contextlib.nullcontext(), currently_running={})
    assert memory.free_or_wait(idle)["state"] == "nothing"
    assert compared == ["again"]
