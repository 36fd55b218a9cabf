"""A server that compiles a model's regions in parallel, in worker processes."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from scripts.server.process import ComfyServer

from ..programs import wait_for
from .rig import Bench, PromptDict, assert_ran_compiled, assert_same, assert_through_regions, compiled

STEPS = 2
COUNTED = re.compile(r"Resolute: (\d+) of (\d+) regions are compiled")
BEGUN = re.compile(r"Resolute: 0 of \d+ regions are compiled")  # logged once before the workers get their jobs


@pytest.fixture(scope="module")
def server(make_server: Callable[..., ComfyServer], tmp_path_factory: pytest.TempPathFactory) -> ComfyServer:
    empty = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor"))}
    return make_server(environment={**empty, "RESOLUTE_WORKERS": "2"})


@pytest.fixture
def bench(server: ComfyServer) -> Bench:
    return Bench(server.client)


def workers() -> list[int]:
    """Process ids of the workers and their children."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if "inductor/compiler/worker.py" in command.read_text():
                found.append(int(command.parent.name))
        except OSError:
            continue
    return found


def test_cancel_ends_the_prompt_and_not_the_compiles(
    bench: Bench, server: ComfyServer, tiny_prompt: Callable[..., PromptDict]
) -> None:
    prompt = compiled(tiny_prompt(seed=1, width=136, height=104, steps=STEPS))
    assert "interrupted" in bench.cancel_once(prompt, lambda: bool(COUNTED.search(server.log()) and workers()))
    compiles = len(bench.texts("compile"))
    wait_for(lambda: len(bench.texts("compile")) > compiles)


@pytest.mark.long
def test_the_image_is_right_and_the_next_size_compiles_nothing(
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
            assert len(BEGUN.findall(server.log())) == 1  # a count is logged once, also after a cancel
            assert "no worker compiled" not in server.log()
            counts = [(int(done), int(total)) for done, total in COUNTED.findall(server.log())]
            assert max(counts)[0] > 5, "each region counts when it comes"
            for (done, total), later in pairwise(counts):  # the decoder's regions are added to the model's
                assert later == (done + 1, total) or later[0] == 0 or (later[0] == done and later[1] > total), counts
            compiles = bench.texts("compile")
            assert len(compiles) == len(set(compiles)) == ours.rise["region_compiles"]
            # One line for the sampling run and one for the decode, which had to wait too.
            assert len(re.findall(r"through regions, \d+ region compiles, waited", server.log())) == 2
        else:
            assert_ran_compiled(ours, STEPS + 1)


def test_the_workers_end_with_a_killed_server(make_server: Any, tmp_path: Path, tiny_prompt: Any) -> None:
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "RESOLUTE_WORKERS": "2"}
    server = make_server(environment=environment)
    before = set(workers())
    server.client.queue(compiled(tiny_prompt(seed=3, width=136, height=104, steps=STEPS)))
    wait_for(lambda: len(set(workers()) - before) >= 3)  # one worker and its two children
    server.process.kill()
    wait_for(lambda: not set(workers()) - before)
