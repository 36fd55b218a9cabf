"""Calls whose disk fails or whose process is killed, and files of a clock that went back.

Faults of one file, and of the store by itself: test_faults.py.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from compile_cache.cache.graph_cache import GraphCache
from compile_cache.config import CacheConfig
from compile_cache.keys import GraphKey, Role
from compile_cache.store.artifact_store import ArtifactStore
from compile_cache.store.shape_history import ShapeHistory

from ..fakes import FakeProgram, Module, answer
from .disk import FileOperations, failing, killed_in_a_child
from .test_artifact_store import KEY, artifact, store_in

needs_fork = pytest.mark.skipif(sys.platform == "win32", reason="a copy of the process needs fork")
ERRORS = {"full": errno.ENOSPC, "read-only": errno.EROFS, "denied": errno.EACCES, "broken": errno.EIO}
SHAPE: GraphKey = Module().call().key


def temporary_files(folder: Path) -> list[Path]:
    return list(folder.rglob("*.tmp"))


@pytest.mark.parametrize("error", ERRORS)
def test_shapes_that_cannot_be_written_cost_no_picture(tmp_path: Path, error: str) -> None:
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        cache = GraphCache(CacheConfig(store_folder=folder))
        program, module = FakeProgram(), Module()
        operations = failing(folder, number, ERRORS[error])
        with operations.watched():
            for _ in range(2):
                assert answer(cache.run(program, module.call())) == module.factor
        assert cache.stats.snapshot()["captures"] == 1
        assert temporary_files(folder) == []
        ShapeHistory(folder / "shapes").record(SHAPE, program)
        assert [graph.key for graph in ShapeHistory(folder / "shapes").of_model(SHAPE.model)] == [SHAPE]
        if not operations.reached:
            break
    assert number > 4, "it found too few operations"


@needs_fork
def test_a_kill_in_a_capture_costs_the_next_process_nothing(tmp_path: Path) -> None:
    class Killed(FakeProgram):
        def capture(self, call: object, result: object, memory: object) -> object:  # type: ignore[override]
            os.kill(os.getpid(), signal.SIGKILL)

    def run(program: FakeProgram) -> GraphCache:
        cache = GraphCache(CacheConfig(store_folder=tmp_path))
        for _ in range(2):
            assert answer(cache.run(program, Module().call())) == 2.0
        return cache

    assert killed_in_a_child(tmp_path, 10**9, lambda: run(Killed()) and None)  # type: ignore[func-returns-value]
    assert ShapeHistory(tmp_path / "shapes").of_model(SHAPE.model) == ()
    counters = run(FakeProgram()).stats.snapshot()
    assert (counters["captures"], counters["replays"]) == (1, 1)
    assert [graph.key for graph in ShapeHistory(tmp_path / "shapes").of_model(SHAPE.model)] == [SHAPE]


class TestAClockThatGoesBack:
    """Files that were written before it have times in the future."""

    def later(self, store: ArtifactStore, hours: float = 30.0) -> None:
        when = time.time() + hours * 3600
        for path in store._folder.iterdir():
            os.utime(path, (when, when))

    def test_the_region_just_saved_stays_and_an_older_one_goes(self, tmp_path: Path) -> None:
        store = store_in(tmp_path / "store", limit=3000)
        for number in range(2):
            store.save(artifact(key=f"{number}" * 64, payload=bytes(1000)))
        self.later(store)
        for key in ("8", "9"):
            store.save(artifact(key=key * 64, payload=bytes(1000)))
            assert key in {name[0] for name in store.names()}, "the region that was just compiled is gone"
            assert len(store.names()) == 2

    def test_all_that_is_new_stays_and_what_is_older_goes(self, tmp_path: Path) -> None:
        store = store_in(tmp_path / "store", limit=5000)
        for number in range(4):
            store.save(artifact(key=f"{number}" * 64, payload=bytes(1000)))
        self.later(store)
        for key in ("7", "8", "9"):
            store.save(artifact(key=key * 64, payload=bytes(1000)))
        assert {"7", "8", "9"} <= {name[0] for name in store.names()}
        assert len(store.names()) == 4, "and no more go than have to"

    def test_what_a_killed_process_left_is_removed(self, tmp_path: Path) -> None:
        store = store_in(tmp_path / "store")
        (store._folder / f"{KEY[:16]}-1.region.x.tmp").write_bytes(b"half")
        self.later(store)
        store.save(artifact())
        assert temporary_files(tmp_path) == []

    def test_shapes_stay_in_the_order_of_their_use(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        second = replace(SHAPE, role=Role.VAE_DECODE)
        ShapeHistory(tmp_path).record(SHAPE, FakeProgram())
        monkeypatch.setattr(time, "time", lambda: 1.0)
        ShapeHistory(tmp_path).record(second, FakeProgram())
        assert [graph.key for graph in ShapeHistory(tmp_path).of_model(SHAPE.model)] == [SHAPE, second]


def test_operations_are_counted_below_the_folder_only(tmp_path: Path) -> None:
    seen: list[str] = []
    (tmp_path / "inside").mkdir()
    with FileOperations(tmp_path / "inside", 2, seen.append).watched():
        (tmp_path / "outside").write_text("")
        (tmp_path / "inside" / "one").write_text("")
        (tmp_path / "inside" / "two").write_text("")
    assert seen == [f"open {tmp_path / 'inside' / 'two'}"]
