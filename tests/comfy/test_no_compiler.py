"""Without a C++ compiler `auto` runs eagerly and says so, and `inductor` says what to install."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.server.process import ComfyServer

from .rig import Bench, assert_same, compiled, failure_of, run_with_events

STEPS = 3
WHY = r"not inductor: there is no C\+\+ compiler"


@pytest.fixture(scope="module")
def bare_server(make_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """A server that finds no compiler, neither on PATH nor through CC or CXX."""
    nothing: Path = tmp_path_factory.mktemp("nothing-here")
    server = make_server(environment={"PATH": str(nothing), "CC": None, "CXX": None})
    yield server
    server.stop()


@pytest.fixture(scope="module")
def bare(bare_server: ComfyServer) -> Bench:
    return Bench(bare_server.client)


def test_inductor_by_name_says_what_to_install_and_auto_runs_eagerly_and_says_why(
    bare: Bench, bare_server: ComfyServer, tiny_prompt: Any, seed: int
) -> None:
    prompt = tiny_prompt(seed=seed, steps=STEPS)
    expected = bare.run(prompt)
    message = failure_of(bare.client, compiled(prompt, "inductor"))
    assert re.search(r"'inductor' cannot run here: there is no C\+\+ compiler", message), message
    assert re.search(r"Install .*'apt install g\+\+'.* choose 'auto'", message), message
    before, events = bare.counters(), run_with_events(bare.client, compiled(prompt, "auto"))
    ours = bare.finished(events.history, before)
    assert_same(ours, expected)
    assert (ours.rise["eager_calls"], ours.rise["graph_calls"]) == (STEPS + 1, 0)
    assert (ours.rise["region_compiles"], ours.rise["compile_failures"]) == (0, 0)
    shown = "\n".join([*(text for _, text in events.texts), bare_server.log()])
    assert re.search(WHY, shown), shown[-2000:]
