"""Core's MultiGPU CFG Split: cond on one GPU, uncond on the other, each through a compiled copy of the model."""

from __future__ import annotations

import itertools

import pytest
import torch

from ..comfy import rig
from ..conftest import MakeServer

STEPS = 4
SPLIT = rig.node("MultiGPU_WorkUnits", max_gpus=2)
SEEDS = itertools.count()  # ComfyUI would answer a repeated prompt without sampling
TOLERANCE = 3e-2  # fp16, over several steps of a random model

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")


@pytest.fixture(scope="module")
def bench(make_server: MakeServer, pytestconfig: pytest.Config) -> rig.Bench:
    """Runs prompts on a server of its own, on CUDA."""
    return rig.Bench(make_server(cpu=False, arguments=pytestconfig.getoption("--server-argument")).client)


@pytest.mark.parametrize("backend", ["inductor", "cudagraph"])
@pytest.mark.parametrize("order", ["compile first", "split first"])
def test_each_gpu_runs_its_own_compiled_copy(bench: rig.Bench, backend: str, order: str) -> None:
    for width, height in ((256, 256), (136, 104), (256, 256)):
        prompt = rig.tiny_prompt(seed=next(SEEDS), width=width, height=height, steps=STEPS)
        prompt = rig.without_decoder(prompt)
        nodes = (rig.compile_model(backend), SPLIT)
        ours = bench.run(rig.with_model(prompt, *(nodes if order == "compile first" else nodes[::-1])))
        plain = bench.run(rig.with_model(prompt, SPLIT))
        error = rig.latent_error(ours.latents[0], plain.latents[0])
        print(backend, order, width, height, f"{error:.1e}", ours.rise)
        assert error <= (0 if backend == "cudagraph" else TOLERANCE)
        calls = {name: ours.rise[name] for name in ("graph_calls", "replays", "eager_calls")}
        assert sum(calls.values()) == 2 * STEPS, calls  # one forward on each GPU in every step
        assert calls["replays"] > 0, ours.rise
        assert ours.bypasses == {}, ours.bypasses
