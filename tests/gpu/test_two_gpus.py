"""Core's MultiGPU CFG Split: cond on one GPU, uncond on the other, each through a compiled copy of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..comfy import rig
from ..comfy.conftest import bench, seed, seeds, server, tiny_prompt  # noqa: F401 (fixtures)

STEPS = 4
SPLIT = rig.node("MultiGPU_WorkUnits", max_gpus=2)
TOLERANCE = 3e-2  # fp16, over several steps of a random model


@pytest.fixture(autouse=True)
def _needs_two() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two NVIDIA GPUs")


@pytest.fixture(scope="session")
def pytestconfig(pytestconfig: pytest.Config) -> pytest.Config:
    """The shared server of these tests runs on CUDA."""
    pytestconfig.option.on_cuda = True
    return pytestconfig


@pytest.mark.parametrize("backend", ["inductor", "cudagraph"])
@pytest.mark.parametrize("order", ["compile first", "split first"])
def test_each_gpu_runs_its_own_compiled_copy(
    bench: rig.Bench,
    tiny_prompt: Any,
    seeds: Any,
    backend: str,
    order: str,  # noqa: F811
) -> None:
    for width, height in ((256, 256), (136, 104), (256, 256)):
        prompt = tiny_prompt(seed=next(seeds), width=width, height=height, steps=STEPS)
        prompt = {name: part for name, part in prompt.items() if name not in ("vae", "decode", "image")}
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
