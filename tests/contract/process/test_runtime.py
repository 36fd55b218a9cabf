"""What belongs to a module goes when the module does, whatever else is going on at that moment."""

from __future__ import annotations

import copy
import gc
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from compile_cache.backends.base import Call
from compile_cache.cache.captures import capture_key
from compile_cache.keys import GraphKey, Role, Signature, TensorSpec

from ..dynamic_vram.fake_paging import Reservation
from ..rig import Model, hooks_of, seeded

_KEY = GraphKey(Signature((("latent", TensorSpec((1,), "float32", "cpu")),)), Role.UNET, "model", "inductor")


@pytest.fixture
def service(adapter: Callable[[str], ModuleType], comfy: None) -> ModuleType:
    return adapter("process.runtime")


@pytest.fixture
def request_of(adapter: Callable[[str], ModuleType], comfy: None) -> Callable[[str], Any]:
    """The request of a compile node with this backend."""
    return lambda backend: adapter("process.compile_request").CompileRequest.resolved(backend, "cpu", Role.UNET)


def test_a_module_that_dies_takes_its_program_with_it(
    service: ModuleType, adapter: Callable[[str], ModuleType], request_of: Callable[[str], Any]
) -> None:
    report = adapter("report.cache_report").report
    module = nn.Linear(2, 2)
    service.program_for(module, request_of("eager"), "cpu")
    service.record_of(module).weights.refresh()
    service.fingerprint_of(module)
    number = service.record_of(module).owner
    assert number in {row["module"] for row in report()["modules"]}
    del module
    gc.collect()
    assert number not in {row["module"] for row in report()["modules"]}
    assert number not in service._records


def test_the_first_call_takes_the_backend_that_is_left_if_one_that_started_lacks_something(
    service: ModuleType, request_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as starting:
        inductor = request_of("inductor").backend
        starting.setattr(type(inductor), "is_starting", True)
        chosen = request_of("auto")
    assert chosen.backend is inductor
    monkeypatch.setattr(type(inductor), "probe", lambda *given: replace(chosen.capabilities, available=False))
    assert service.program_for(nn.Linear(2, 2), chosen, "cpu")[1] == "eager"


class Graph:
    bytes = 1 << 20

    def __init__(self) -> None:
        self.is_open = True

    def replay(self, tensors: Any) -> Any:
        raise AssertionError("it is not replayed")

    def close(self) -> None:
        self.is_open = False


def test_a_module_that_dies_leaves_nothing_though_no_prompt_follows(
    service: ModuleType,
    adapter: Callable[[str], ModuleType],
    request_of: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_module = lambda module, role, run, bypass: hooks_of(module)(run, bypass)  # noqa: E731
    monkeypatch.setattr(adapter("process.module_hooks"), "hooks_of", of_module)
    module = seeded(Model)
    program, _ = service.program_for(module, request_of("inductor"), "cpu")
    record, cache, graph = service.record_of(module), service.cache(), Graph()
    # Our code may hold its blocks, once their hooks are built, its pages and its captures.
    reservation = Reservation(pages=1)
    next(module.children())._v = reservation.alloc(8)
    record.weights.refresh()
    assert record.weights.paged.pages
    call = Call(_KEY, [torch.zeros(1)], invoke=lambda tensors, module=module: tensors[0], device="cpu", epoch=1)
    program._worker_count = lambda call: 2
    program._workers = SimpleNamespace(prepare=None, running=False, forget=lambda owner: None)
    program.run(call)
    cache._captures.put(capture_key(program, replace(call, epoch=7)), graph, graph.bytes)
    cache._capture_policy.out_of_memory(capture_key(program, call))
    weights = [weakref.ref(each) for each in (reservation, *module.parameters())]
    assert program.blocks
    assert weights

    def left() -> tuple[int, bool, int, int]:
        alive = sum(weight() is not None for weight in weights)
        return alive, graph.is_open, cache.bytes, len(cache._capture_policy._states)

    del module, program, record, call, reservation
    gc.collect()
    gc.disable()  # memory of the device does not wait for another collection
    try:
        deadline = time.monotonic() + 60  # for a busy machine; nothing of ours is called meanwhile
        while any(left()) and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        gc.enable()
    assert left() == (0, False, 0, 0)


def test_what_a_dead_module_leaves_waits_for_a_call_that_runs(
    service: ModuleType, request_of: Callable[[str], Any]
) -> None:
    module, graph = nn.Linear(2, 2), Graph()
    program, _ = service.program_for(module, request_of("eager"), "cpu")
    cache = service.cache()
    call = Call(_KEY, [torch.zeros(1)], invoke=lambda tensors: tensors[0], device="cpu", epoch=1)
    cache._captures.put(capture_key(program, call), graph, graph.bytes)
    with cache._lock:  # as a replay holds it
        del module, program
        gc.collect()
        time.sleep(0.05)
        assert graph.is_open
    deadline = time.monotonic() + 60
    while graph.is_open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not graph.is_open


def test_the_thread_that_cleans_up_ends_with_the_process(service: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_ending", threading.Event())
    monkeypatch.setattr(service, "_wake", queue.SimpleQueue())
    cleaner = threading.Thread(target=service._clean_up, daemon=True)
    cleaner.start()
    service._end_cleaner(cleaner)
    assert not cleaner.is_alive()


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
    backend = SimpleNamespace(prewarm=lambda device, *more: asked.append(device))
    startup = adapter("process.preload")
    monkeypatch.setattr(startup.registry, "candidates", lambda name: [backend])
    body = {"prompt": prompt, "client_id": "a browser"}
    kept = copy.deepcopy(body)
    assert startup.before_prompt(body) is body
    assert body == kept
    assert len(asked) == expected


def test_a_start_gets_the_backend_ready(
    service: ModuleType, adapter: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.device] = []
    startup = adapter("process.preload")
    backend = SimpleNamespace(prewarm=lambda device, *more: asked.append(device))
    monkeypatch.setattr(startup.registry, "candidates", lambda name: [backend])
    startup._preload()
    assert len(asked) == 1


@pytest.mark.parametrize("missing", [set(), {"b"}])
def test_workers_start_before_the_other_regions_are_loaded_if_some_are_missing(
    service: ModuleType, adapter: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, missing: set[str]
) -> None:
    done: list[str] = []
    startup = adapter("process.preload")
    readiness, shapes = startup.shape_status, service.cache().shapes
    key = startup.GraphKey(_KEY.signature, _KEY.role, "model", "inductor")
    used = readiness.UsedShape(key, frozenset("abc"), application=service.cache().config.application)
    monkeypatch.setattr(shapes, "models", lambda: [SimpleNamespace(digest="m", name="SDXL", graphs=(used,))])
    backend = SimpleNamespace(
        prewarm=lambda *given: done.append("workers" if given[3:] == (True,) else "rest"),
        preload=lambda keys, *_: done.extend(keys) or len({*keys} - missing),
        locate=lambda keys, *_: readiness.Located(on_disk=keys - missing, missing=keys & missing),
        probe=lambda device: SimpleNamespace(available=True, keeps_graphs=False, captures=True),
    )
    monkeypatch.setattr(startup.registry, "candidates", lambda name: [backend])
    monkeypatch.setattr(startup.registry, "get", lambda name: backend)
    startup._preload()
    assert done == ["c", *(["workers"] if missing else []), "b", "a", "rest"]


def test_the_server_is_asked_to_tell_of_prompts(adapter: Callable[[str], ModuleType], comfy: None) -> None:
    startup, handlers, starts = adapter("process.preload"), list[Any](), list[Any]()
    server = SimpleNamespace(app=SimpleNamespace(on_startup=starts), add_on_prompt_handler=handlers.append)
    startup.begin(server)
    assert handlers == [startup.before_prompt]
    assert len(starts) == 1


def test_a_request_that_is_no_prompt_is_left_to_comfyui(adapter: Callable[[str], ModuleType], comfy: None) -> None:
    body: dict[str, Any] = {"client_id": "a browser"}
    assert adapter("process.preload").before_prompt(body) is body


def test_a_setting_that_cannot_be_read_is_told_at_the_start(
    adapter: Callable[[str], ModuleType],
    service: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(service, "_cache", None)
    monkeypatch.setenv("RESOLUTE_BUDGET_MB", "lots")
    adapter("process.preload")._preload()
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "RESOLUTE_BUDGET_MB='lots' is not a whole number" in told
    assert "started again" in told
    assert not any(record.exc_info for record in caplog.records)
