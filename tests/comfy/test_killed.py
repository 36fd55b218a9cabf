"""Workers and servers that are killed, before a model is compiled and after it.

With `--on-cuda` the calls before are replays of originals (tier 1), and those after replay compiled blocks (tier 2).
"""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import pytest

from scripts.server.process import ComfyServer

from ..conftest import MakeServer
from ..programs import wait_for
from . import rig
from .test_workers import workers

pytestmark = pytest.mark.long

STEPS = 4
SEEDS = itertools.count()  # ComfyUI would answer a repeated prompt without sampling
CUDA_TOLERANCE = 3e-2  # fp16, over several steps of a random model


def run_both(server: ComfyServer, width: int = 256) -> rig.Run:
    """Run a prompt without Resolute and with it, and compare the latents. ComfyUI keeps the latter's model."""
    bench, prompt = rig.Bench(server.client), rig.tiny_prompt(seed=next(SEEDS), width=width, height=256, steps=STEPS)
    plain = rig.without_decoder(prompt)
    expected = bench.run(plain)
    ours = bench.run(rig.with_model(plain, rig.compile_model()))
    error = rig.latent_error(ours.latents[0], expected.latents[0])
    assert error <= (rig.LATENT_TOLERANCE if server.cpu else CUDA_TOLERANCE)
    return ours


def is_compiled(run: rig.Run) -> bool:
    """Every forward of the prompt ran compiled blocks alone."""
    through_regions = run.rise["replays"] + run.rise["graph_calls"]
    return through_regions == STEPS and not run.rise["original_replays"] + run.rise["waiting_calls"]


def kill_workers(server: ComfyServer, others: set[int]) -> None:
    """Run prompts until one worker and its two children live, and kill them. A prompt that ends before the compiler is
    imported queues nothing.
    """
    wait_for(lambda: bool(run_both(server)) and len(set(workers()) - others) >= 3)
    for each in set(workers()) - others:
        os.kill(each, signal.SIGKILL)


def kill(server: ComfyServer) -> None:
    assert server.process is not None
    server.process.kill()
    server.process.wait()


def test_latents_are_right_after_each_kill(
    make_server: MakeServer, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    ours = {"RESOLUTE_STORE": str(tmp_path / "store"), "RESOLUTE_WORKERS": "2", "RESOLUTE_COMPILE": "behind"}
    on_cuda, others = pytestconfig.getoption("--on-cuda"), set(workers())

    def start() -> ComfyServer:
        environment = {**ours, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
        return make_server(cpu=not on_cuda, environment=environment)

    first = start()
    kill_workers(first, others)
    assert run_both(first).rise["original_replays" if on_cuda else "eager_calls"] > 0
    kill(first)

    second = start()
    assert run_both(second).rise["eager_calls"] > 0, "the first server had compiled everything before it was killed"
    wait_for(lambda: is_compiled(run_both(second)))
    kill_workers(second, others)
    assert is_compiled(run_both(second))
    run_both(second, width=320)
    kill(second)

    third = start()
    wait_for(lambda: is_compiled(run_both(third)))
    assert rig.Bench(third.client).counters()["region_compiles"] == 0
    wait_for(lambda: not set(workers()) - others)
