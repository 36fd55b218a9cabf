"""Free from the thread of the server, while prompts capture and replay in theirs."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from compile_cache.backends.base import Call, CaptureFacts
from compile_cache.captures.captures import Captures

from ..fakes import FakeGraph, FakeProgram, answer, session


class Capturing(FakeProgram):
    """Takes a moment to capture; memory that is given back meanwhile would break a capture of CUDA's."""

    capturing = False

    def capture(self, call: Call, result: Any, facts: CaptureFacts) -> FakeGraph:
        self.capturing = True
        time.sleep(0.001)
        graph = super().capture(call, result, facts)
        self.capturing = False
        return graph


def test_two_hundred_frees_during_captures_break_none(cache: Any, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program, wrong, ended = Capturing(), list[Any](), threading.Event()

    def released(self: Captures) -> None:
        if program.capturing:
            wrong.append("memory was given back during a capture")

    monkeypatch.setattr(Captures, "released", released)

    def prompts() -> None:
        while not ended.is_set():
            with session(cache, program.owner):
                for side in (8, 8, 16, 16):
                    try:
                        if answer(cache.run(program, module.call(side))) != 2.0:
                            wrong.append(side)
                    except AssertionError as error:
                        wrong.append(error)

    thread = threading.Thread(target=prompts)
    thread.start()
    for _ in range(200):
        cache.trim()
        time.sleep(0)
    ended.set()
    thread.join()
    assert wrong == []
    assert cache.stats.counters.captures > 0
    cache.trim()
    assert (cache.bytes, program.open_graphs) == (0, 0)
