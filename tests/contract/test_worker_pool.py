"""The children of a worker process: forked where that works, and what happens where it does not."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from compile_cache.backends.inductor import worker

# What a driver does in forked children that was started before. Spawned ones know nothing of it.
does: list[str] = []


def begin(device: str) -> None:
    if "refuses" in does:
        raise RuntimeError(f"{device} cannot be used in a forked process")
    if "hangs" in does:
        time.sleep(600)


def ready() -> None: ...


def start_method() -> str:
    return type(multiprocessing.process.current_process()).__name__


@pytest.fixture(params=["works", "refuses", "hangs"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(worker, "_BEGIN", 2.0)
    does.append(request.param)
    yield request.param
    does.clear()


def test_children_import_for_themselves_where_a_driver_does_not_take_to_forks(driver: str) -> None:
    pool = worker._pool(SimpleNamespace(begin=begin, ready=ready), "cuda:0", 2)
    try:
        forked = sys.platform == "linux" and driver == "works"
        assert pool.submit(start_method).result() == ("ForkProcess" if forked else "SpawnProcess")
        assert pool.submit(os.getpid).result() != os.getpid()
    finally:
        pool.shutdown()
