"""Inductor's settings, read while another pack's torch.compile has them changed for itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._dynamo.convert_frame import compile_lock
from torch._inductor import config as inductor_config

from compile_cache.backends.inductor.compile import environment


def digest() -> str:
    return environment.environment_of(torch.device("cpu"), "").digest()


@contextmanager
def another_pack_compiles() -> Iterator[threading.Event]:
    """As torch.compile does it in another thread: torch's lock, and changed settings until the event is set."""
    started, end = threading.Event(), threading.Event()

    def compile_something() -> None:
        with compile_lock, inductor_config.patch(max_autotune=not inductor_config.max_autotune):
            started.set()
            assert end.wait(60)

    thread = threading.Thread(target=compile_something)
    thread.start()
    try:
        assert started.wait(60)
        yield end
    finally:
        end.set()
        thread.join()


def test_the_settings_are_those_from_before_the_compile() -> None:
    before = digest()
    with another_pack_compiles():
        assert [digest() for _ in range(20)] == [before] * 20
    assert digest() == before


def test_a_first_reader_waits_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    before, found = digest(), list[str]()
    monkeypatch.setattr(environment, "_latest", None)
    with another_pack_compiles() as end:
        reader = threading.Thread(target=lambda: found.append(digest()))
        reader.start()
        reader.join(0.5)
        assert found == [], "it read the settings of a compile"
        end.set()
        reader.join(60)
    assert found == [before]
