"""A server that compiles a model's regions at once, in processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.support.server import ComfyServer

from .conftest import QUICK_START
from .rig import Bench, PromptDict, assert_ran_compiled, assert_same, assert_through_regions, compiled

STEPS = 2


@pytest.fixture(scope="module")
def server(make_server: Callable[..., ComfyServer], tmp_path_factory: pytest.TempPathFactory) -> ComfyServer:
    empty = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor"))}
    return make_server(environment={**QUICK_START, **empty, "RESOLUTE_WORKERS": "2"})


@pytest.fixture
def bench(server: ComfyServer) -> Bench:
    return Bench(server.client)


def workers(server: ComfyServer) -> list[int]:
    """The processes that compile for the server."""
    assert server.process is not None
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            command = (status.parent / "cmdline").read_text()
        except OSError:
            continue
        if parent == server.process.pid and "inductor/worker.py" in command:
            found.append(int(status.parent.name))
    return found


def test_cancel_ends_them(bench: Bench, server: ComfyServer, tiny_prompt: Callable[..., PromptDict]) -> None:
    prompt = compiled(tiny_prompt(seed=1, width=136, height=104, steps=STEPS))
    assert "interrupted" in bench.cancel_once(prompt, lambda: "regions (all at once)" in server.log())
    assert workers(server) == []


def test_the_picture_is_right_and_the_next_size_compiles_nothing(
    bench: Bench, server: ComfyServer, tiny_prompt: Callable[..., PromptDict]
) -> None:
    for number, size in enumerate([(136, 104), (72, 200)]):
        prompt: Any = tiny_prompt(seed=2, width=size[0], height=size[1], steps=STEPS)
        expected = bench.run(prompt)
        ours = bench.run(compiled(prompt))
        assert_same(ours, expected)
        if number == 0:
            assert_through_regions(ours, STEPS + 1)
            assert ours.rise["region_compiles"] > 5
            assert server.log().count("regions (all at once)") == 3  # cancelled, then the UNet's and the decoder's
            assert "was not compiled ahead" not in server.log()
        else:
            assert_ran_compiled(ours, STEPS + 1)
