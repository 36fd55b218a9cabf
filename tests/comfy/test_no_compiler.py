"""Without a C++ compiler `auto` runs eagerly and says so, and `inductor` says what to install."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.errors import PromptError
from scripts.server.events import run_with_events
from scripts.server.process import ComfyServer

from .rig import Bench, assert_same, compiled

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


def test_auto_runs_eagerly_and_is_right(bare: Bench, tiny_prompt: Any, seed: int) -> None:
    prompt = tiny_prompt(seed=seed, steps=STEPS)
    expected, ours = bare.run(prompt), bare.run(compiled(prompt, "auto"))
    assert_same(ours, expected)
    assert (ours.rise["eager_calls"], ours.rise["graph_calls"]) == (STEPS + 1, 0)
    assert (ours.rise["region_compiles"], ours.rise["compile_failures"]) == (0, 0)


def test_auto_says_why_on_the_node_or_in_the_log(
    bare: Bench, bare_server: ComfyServer, tiny_prompt: Any, seed: int
) -> None:
    events = run_with_events(bare.client, compiled(tiny_prompt(seed=seed, steps=STEPS), "auto"))
    shown = "\n".join([*(text for _, text in events.texts), bare_server.log()])
    assert re.search(WHY, shown), shown[-2000:]


def test_inductor_by_name_says_what_to_install(bare: Bench, tiny_prompt: Any, seed: int) -> None:
    with pytest.raises(PromptError) as caught:
        bare.run(compiled(tiny_prompt(seed=seed, steps=STEPS), "inductor"))
    message = str(caught.value)
    assert re.search(r"'inductor' cannot run here: there is no C\+\+ compiler", message), message
    assert re.search(r"Install .*'apt install g\+\+'.* choose 'auto'", message), message


def test_a_refused_backend_does_not_affect_the_next_prompt(bare: Bench, tiny_prompt: Any, seed: int) -> None:
    prompt = tiny_prompt(seed=seed, steps=STEPS)
    expected = bare.run(prompt)
    with pytest.raises(PromptError, match="cannot run here"):
        bare.run(compiled(prompt, "inductor"))
    assert_same(bare.run(compiled(prompt, "eager")), expected)
