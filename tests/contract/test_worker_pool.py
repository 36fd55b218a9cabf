"""The children of a worker process: forked where that works, and what happens where it does not."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from compile_cache.backends.inductor import worker

# What a driver does that was started before a fork: it cannot be used in the children. Spawned ones know nothing of it.
started: list[str] = []


def begin(device: str) -> None:
    if started:
        raise RuntimeError(f"{device} cannot be used in a forked process")


def ready() -> None: ...


def start_method() -> str:
    return type(multiprocessing.process.current_process()).__name__


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether one was started."""
    started.extend(["driver"] * request.param)
    yield request.param
    started.clear()


@pytest.mark.parametrize("driver", [False, True], indirect=True)
def test_children_import_for_themselves_where_a_driver_does_not_take_to_forks(driver: bool) -> None:
    pool = worker._pool(SimpleNamespace(begin=begin, ready=ready), "cuda:0", 2)
    try:
        forked = sys.platform == "linux" and not driver
        assert pool.submit(start_method).result() == ("ForkProcess" if forked else "SpawnProcess")
        assert pool.submit(os.getpid).result() != os.getpid()
    finally:
        pool.shutdown()
