"""What belongs to a module goes when the module does, whatever else is going on at that moment."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn


@pytest.fixture
def service(adapter: Callable[[str], ModuleType], comfy: None) -> ModuleType:
    return adapter("process.runtime")


def build_no_hooks(run: Any, bypass: Any) -> list[Any]:
    return []


def test_a_module_that_dies_takes_its_program_with_it(
    service: ModuleType, adapter: Callable[[str], ModuleType]
) -> None:
    report = adapter("report.cache_report").report
    module = nn.Linear(2, 2)
    service.program_for(module, "eager", "cpu", build_no_hooks)
    service.record_of(module).weights.refresh()
    service.fingerprint_of(module)
    number = service.record_of(module).owner
    assert number in {row["module"] for row in report()["modules"]}
    del module
    gc.collect()
    assert number not in {row["module"] for row in report()["modules"]}
    assert number not in service._records


def test_a_module_may_die_in_a_thread_that_somebody_waits_for_with_the_lock_held(service: ModuleType) -> None:
    # Inductor's own threads collect garbage too, while a prompt compiles and waits for them.
    module = nn.Linear(2, 2)
    module.myself = [module]  # type: ignore[assignment]  # a cycle: only a collection ends it
    service.record_of(module)
    del module
    with service.cache()._lock, service._lock:
        collector = threading.Thread(target=gc.collect, daemon=True)
        collector.start()
        collector.join(20)
        assert not collector.is_alive(), "the collection waits for a lock"


OURS = {"class_type": "ResoluteCompileModel", "inputs": {"backend": "auto", "model": ["1", 0]}}
OF_ONEDIFF = {"class_type": "ModelSpeedup", "inputs": {"model": ["1", 0]}}
OF_OTHERS = {"class_type": "TorchCompileModel", "inputs": {"backend": "inductor", "model": ["1", 0]}}
LOADER = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "a.safetensors"}}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ({"1": LOADER, "2": OURS}, 1),
        ({"1": LOADER, "2": OURS, "3": OURS}, 1),
        ({"1": LOADER, "2": OF_ONEDIFF}, 1),
        ({"1": LOADER, "2": OF_OTHERS}, 0),
        ({"1": LOADER, "2": {**OURS, "inputs": {"backend": ["1", 0]}}}, 0),
        ({"1": {}, "2": OURS}, 1),
        ({"1": None, "2": OURS}, 0),
        ([], 0),
        (None, 0),
    ],
)
def test_a_queued_prompt_gets_the_backends_of_our_nodes_ready_and_stays_as_it_is(
    service: ModuleType,
    adapter: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    prompt: Any,
    expected: int,
) -> None:
    asked: list[torch.device] = []
    backend = SimpleNamespace(prewarm=lambda device, config: asked.append(device))
    startup = adapter("restart.preload")
    monkeypatch.setattr(startup.registry, "candidates", lambda name: [backend])
    body = {"prompt": prompt, "client_id": "a browser"}
    kept = copy.deepcopy(body)
    assert startup.before_prompt(body) is body
    assert body == kept
    assert len(asked) == expected


def test_the_server_is_asked_to_tell_of_prompts_once(
    adapter: Callable[[str], ModuleType], comfy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    startup, handlers, starts = adapter("restart.preload"), list[Any](), list[Any]()
    server = SimpleNamespace(app=SimpleNamespace(on_startup=starts), add_on_prompt_handler=handlers.append)
    monkeypatch.setattr(startup, "_begun", False)
    startup.begin(server)
    startup.begin(server)
    assert handlers == [startup.before_prompt]
    assert len(starts) == 1


def test_a_request_that_is_no_prompt_is_left_to_comfyui(adapter: Callable[[str], ModuleType], comfy: None) -> None:
    body: dict[str, Any] = {"client_id": "a browser"}
    assert adapter("restart.preload").before_prompt(body) is body


def test_a_setting_that_cannot_be_read_is_told_at_the_start(
    adapter: Callable[[str], ModuleType],
    service: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(service, "_cache", None)
    monkeypatch.setenv("RESOLUTE_BUDGET_MB", "lots")
    adapter("restart.preload")._preload()
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "RESOLUTE_BUDGET_MB='lots' is not a whole number" in told
    assert "started again" in told
    assert not any(record.exc_info for record in caplog.records)
