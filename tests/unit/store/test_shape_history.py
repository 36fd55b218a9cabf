"""Shape history: shapes survive a restart as JSON. Files that are not right: test_faults.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from compile_cache.keys import GraphKey, Role, Signature, TensorSpec
from compile_cache.store import shape_history
from compile_cache.store.shape_history import ShapeHistory


class Regions:
    """A program with these regions."""

    def __init__(self, keys: list[str]) -> None:
        self.region_keys = frozenset(keys)


MODEL = "abcdef0123456789" * 4
OTHER = "0123456789abcdef" * 4


def key(side: int = 8, model: str = MODEL, role: Role = Role.UNET, **more: Any) -> GraphKey:
    tensors = (
        ("latent", TensorSpec((2, 4, side, side), "float16", "cuda", "channels_last")),
        ("context", TensorSpec((2, 77, 768), "float16", "cuda")),
    )
    values = (("control", ("input", "output")), ("guidance", 3.5), ("y", None), ("flag", True), ("steps", 2))
    return GraphKey(Signature(tensors, values), role, model, "inductor", **more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shapes"


def test_another_process_reads_equal_keys_with_the_last_used_one_at_the_end(folder: Path) -> None:
    first = ShapeHistory(folder)
    first.set_name(MODEL, "SDXL")
    keys = [key(8), key(16), key(8, role=Role.DEEPCACHE_FULL), key(8, options=(("precision", "high"),))]
    for each in keys:
        first.record(each, Regions(["r1", "r2"]), 0.2)
    found = ShapeHistory(folder).of_model(MODEL)
    assert [each.key for each in found] == keys
    assert [hash(each.key) for each in found] == [hash(each) for each in keys]
    assert found[0].regions == {"r1", "r2"}
    assert found[0].seconds == 0.2


def test_what_a_graph_computes_for_the_user_is_kept_and_may_be_missing(folder: Path) -> None:
    history = ShapeHistory(folder)
    history.set_size(key(8), "64x64, batch 2")
    history.record(key(8), Regions([]))
    history.record(key(16), Regions([]))
    (file,) = folder.iterdir()
    assert [each.size for each in ShapeHistory(folder).of_model(MODEL)] == ["64x64, batch 2", ""]
    stored = json.loads(file.read_text("utf-8"))
    for each in stored["graphs"]:
        del each["size"]  # as a version without it writes
    file.write_text(json.dumps(stored), "utf-8")
    assert [each.size for each in ShapeHistory(folder).of_model(MODEL)] == ["", ""]


def test_models_are_listed_by_name_with_the_last_used_one_first(folder: Path) -> None:
    memory = ShapeHistory(folder)
    memory.set_name(MODEL, "SDXL")
    memory.record(key(), Regions(["a", "b"]))
    memory.record(key(16), Regions(["b", "c"]))
    memory.record(key(model=OTHER), Regions([]))
    assert [(model.name, len(model.graphs), model.regions) for model in ShapeHistory(folder).models()] == [
        ("a model", 1, frozenset()),
        ("SDXL", 2, {"a", "b", "c"}),
    ]


def test_a_shape_used_again_moves_to_the_end_and_keeps_its_capture_time(folder: Path) -> None:
    first = ShapeHistory(folder)
    first.record(key(8), Regions(["r"]), 0.5)
    first.record(key(16), Regions(["r"]), 0.25)
    ShapeHistory(folder).record(key(8), Regions(["r"]))
    assert [(each.key, each.seconds) for each in ShapeHistory(folder).of_model(MODEL)] == [
        (key(16), 0.25),
        (key(8), 0.5),
    ]


def test_two_processes_add_to_one_file(folder: Path) -> None:
    one, two = ShapeHistory(folder), ShapeHistory(folder)
    one.record(key(8), Regions([]))
    two.record(key(16), Regions([]))
    one.record(key(24), Regions([]))
    assert [each.key for each in one.of_model(MODEL)] == [key(8), key(16), key(24)]


def test_the_number_of_shapes_is_bounded_and_the_oldest_go(folder: Path) -> None:
    memory = ShapeHistory(folder)
    for side in range(1, 101):
        memory.record(key(side), Regions([]))
    kept = [each.key for each in memory.of_model(MODEL)]
    assert kept == [key(side) for side in range(37, 101)]


def test_a_key_is_written_once_in_each_process(folder: Path) -> None:
    memory = ShapeHistory(folder)
    memory.record(key(), Regions([]))
    (file,) = folder.iterdir()
    file.unlink()
    memory.record(key(), Regions([]))
    assert list(folder.iterdir()) == []


def test_without_a_folder_nothing_is_stored() -> None:
    memory = ShapeHistory(None)
    memory.record(key(), Regions([]))
    assert memory.of_model(MODEL) == ()
    assert memory.models() == []


def test_a_folder_that_cannot_be_written_is_logged_once_and_breaks_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shape_history, "_RETRY_SECONDS", 0.0)
    (tmp_path / "shapes").write_text("in the way")
    memory = ShapeHistory(tmp_path / "shapes")
    memory.record(key(), Regions([]))
    memory.record(key(16), Regions([]))
    assert "a shape could not be stored; a later call tries again" in caplog.text
    assert len(caplog.records) == 1
    assert memory.of_model(MODEL) == ()
    assert memory.models() == []


class Held:
    """A failing `os.replace`: Windows cannot replace a file that another program reads."""

    def __init__(self, failures: int) -> None:
        self.attempts, self.failures = 0, failures
        self._replace = os.replace

    def __call__(self, source: Any, target: Any) -> None:
        self.attempts += 1
        if self.attempts <= self.failures:
            raise PermissionError(13, "Permission denied")
        self._replace(source, target)


def test_a_failed_write_is_repeated_by_a_later_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shape_history, "_RETRY_SECONDS", 0.0)
    memory = ShapeHistory(folder)
    memory.record(key(8), Regions([]))
    held = Held(failures=2)
    monkeypatch.setattr(os, "replace", held)
    for _ in range(5):
        memory.record(key(16), Regions([]))
    assert held.attempts == 3
    assert [each.key for each in memory.of_model(MODEL)] == [key(8), key(16)]
    assert [path.suffix for path in folder.iterdir()] == [".json"]
    assert len(caplog.records) == 1


def test_after_a_failed_write_calls_wait_before_trying_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sampler step is a call, so a retry in each would slow sampling down."""
    monkeypatch.setattr(shape_history, "_RETRY_SECONDS", 1e9)
    held = Held(failures=99)
    monkeypatch.setattr(os, "replace", held)
    memory = ShapeHistory(folder)
    for side in range(8, 80, 8):
        memory.record(key(side), Regions([]))
    assert held.attempts == 1


def test_a_file_that_cannot_be_read_now_is_not_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example while a virus scanner reads it: replacing it would lose the stored shapes."""
    monkeypatch.setattr(shape_history, "_RETRY_SECONDS", 0.0)
    ShapeHistory(folder).record(key(8), Regions([]))
    memory = ShapeHistory(folder)

    def refuse(*_: Any, **__: Any) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        memory.record(key(16), Regions([]))
        assert memory.models() == []
        assert memory.of_model(MODEL) == ()
    assert [each.key for each in memory.of_model(MODEL)] == [key(8)]
    memory.record(key(16), Regions([]))
    assert [each.key for each in memory.of_model(MODEL)] == [key(8), key(16)]


class Failing:
    @property
    def region_keys(self) -> frozenset[str]:
        raise RuntimeError("a broken program")


def test_no_error_in_recording_reaches_the_caller(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    ShapeHistory(folder).record(key(), Failing())
    ShapeHistory(folder).record(key(options=(("precision", object()),)), Regions([]))
    assert len(caplog.records) == 2
    assert ShapeHistory(folder).models() == []


def test_another_models_file_is_ignored(folder: Path) -> None:
    ShapeHistory(folder).record(key(), Regions(["r"]))
    (file,) = folder.iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "digest": OTHER}))
    memory = ShapeHistory(folder)
    assert memory.of_model(MODEL) == ()
    memory.record(key(16), Regions([]))
    assert [each.key for each in memory.of_model(MODEL)] == [key(16)]


def test_what_is_known_of_shapes_in_memory_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape_history, "_MAX_SIZES", 4)
    history = ShapeHistory(folder)
    for side in range(8, 24):
        history.set_size(key(side), f"{side}")
        history.record(key(side), Regions([]))
        assert len(history._recorded) <= 4 and len(history._sizes) <= 4
    assert [each.size for each in ShapeHistory(folder).of_model(MODEL)] == [f"{side}" for side in range(8, 24)]
