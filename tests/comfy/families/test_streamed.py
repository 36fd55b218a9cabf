"""Sampling runs of models that stream: the bits of whole blocks, and which weights cross a bus that counts bytes.

Core's samplers and noise levels drive a small model of each family. Its Linear layers have allocations in a reservation
of DynamicVRAM that never has a page, so each block asks for its weights in each step.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from .kit import Bench, full_device, relative_error, run_traces
from .models import MODELS, Size

STEPS = 4
# How many calls of the model each sampler makes in a step, and whether all have a noise level of the schedule.
SAMPLERS = {"dpmpp_2m": True, "euler_ancestral": True, "heun": True, "dpmpp_sde": False}
FORESEEN = ("Flux", "SD3.5", "Qwen-Image")
BATCH = 2  # where blocks are counted: see `BATCHES` in test_split


class Streaming:
    """A model that streams. moved: bytes over the bus since the last run began, by module."""

    def __init__(self, core: SimpleNamespace, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench = Bench(core, MODELS[name])
        self.forward = self.bench._forward
        self.paged = self.forward.runner.weights.paged
        self.paged.unsupported = None
        self.moved: Counter[str] = Counter()
        self.control: Any = None
        self.delay = 0.0  # of the time that the model gets, behind that of its noise level
        self.model_sampling = flow()
        self._split_blocks = core.ours("dynamic_vram.split_blocks").SplitBlocks
        self.names: dict[Any, str] = full_device().page(self.bench.module)
        self.bytes_of = {path: module._v[2] for module, path in self.names.items()}
        monkeypatch.setattr(core.ours("dynamic_vram.streamed_blocks"), "loaded", self._loaded)

    @contextlib.contextmanager
    def _loaded(
        self, modules: Any, device: Any, dtype: Any, maps: bool, count: Callable[[int], None], resident: Any
    ) -> Iterator[Any]:
        for module in modules:
            self.moved[self.names[module]] += module._v[2]
            count(module._v[2])
        yield []

    def run_whole(self, sampler: str, batch: int = 1, prompt: int = 1) -> torch.Tensor:
        """The same with whole blocks."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(self._split_blocks, "_split", lambda *_: None)
            return self.run(sampler, batch, prompt)

    def times_moved(self) -> dict[str, int]:
        """How often each module's weights crossed the bus."""
        return {path: size // self.bytes_of[path] for path, size in self.moved.items()}

    def run(self, sampler: str, batch: int = 1, prompt: int = 1) -> torch.Tensor:
        """A whole sampling run through Resolute: its latent."""
        self.moved.clear()
        self.forward.begin(self)
        try:
            with self.bench.compiled():
                return self.sample(sampler, batch, prompt)
        finally:
            self.forward.end()

    def sample(self, sampler: str, batch: int = 1, prompt: int = 1) -> torch.Tensor:
        sampling: Any = importlib.import_module("comfy.k_diffusion.sampling")
        sigmas = torch.linspace(1, 0, STEPS + 1)
        sigmas[:-1] = sigmas[:-1] * 0.9 + 0.05
        torch.manual_seed(prompt)
        given = self.bench.model.call(Size(batch, 8, 10, 7))
        torch.manual_seed(7)
        noise = torch.randn_like(given["x"])
        denoise = Denoiser(self, given, sigmas)
        # Each sampler draws the noise of its steps from the seed.
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(3)
            result: torch.Tensor = getattr(sampling, f"sample_{sampler}")(
                denoise, noise, sigmas, extra_args={"seed": 3}, disable=True
            )
        return result


class Denoiser:
    """`BaseModel.apply_model`, and the wrappers that a sampler looks through."""

    def __init__(self, streaming: Streaming, given: dict[str, Any], sigmas: torch.Tensor) -> None:
        self._streaming, self._given, self._sigmas = streaming, given, sigmas
        sampling = streaming.model_sampling
        self.inner_model = SimpleNamespace(
            inner_model=SimpleNamespace(model_sampling=sampling),
            model_patcher=SimpleNamespace(get_model_object=lambda name: sampling),
        )

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor, **_: Any) -> torch.Tensor:
        sampling = self._streaming.model_sampling
        options = {"sample_sigmas": self._sigmas, "sigmas": sigma}
        time = sampling.timestep(sigma).float() + self._streaming.delay
        given = {**self._given, "x": x, "timestep": time, "control": self._streaming.control}
        out = self._streaming.bench.call(given, options)
        denoised: torch.Tensor = sampling.calculate_denoised(sigma, out, x)
        return denoised


def flow() -> Any:
    found: Any = importlib.import_module("comfy.model_sampling")
    return type("Flow", (found.ModelSamplingDiscreteFlow, found.CONST), {})()


@pytest.fixture
def streaming(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Streaming]:
    run_traces(core, monkeypatch)
    return lambda name: Streaming(core, name, monkeypatch)


def spared(model: Streaming) -> set[str]:
    return {path for module, path in model.names.items() if model.paged.order.is_unneeded(module)}


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", FORESEEN)
def test_every_sampler_has_the_bits_of_whole_blocks_and_moves_what_no_step_needs_once(
    streaming: Callable[..., Streaming], name: str
) -> None:
    model = streaming(name)
    model.run("euler_ancestral")  # blocks are traced
    for sampler, is_scheduled in SAMPLERS.items():
        whole = model.run_whole(sampler)
        assert not spared(model) - model.moved.keys()
        assert relative_error(whole, model.sample(sampler)) < 1e-4
        assert torch.equal(model.run(sampler), whole)
        times = model.times_moved()
        of_prologues = {times.pop(path) for path in spared(model)}
        if is_scheduled:
            assert of_prologues == {1}, sampler
        else:  # once for the schedule, and for each level between two of it
            assert of_prologues <= set(range(2, STEPS + 1))
        assert min(times.values()) >= STEPS
        assert model.paged.kept.bytes == 0, "it is gone at the end of the run"


@pytest.mark.parametrize("is_first", [True, False])
def test_the_report_counts_bytes_and_prologues(streaming: Callable[..., Streaming], is_first: bool) -> None:
    """In the first run too, after whose first call the pages move."""
    model = streaming("Flux")
    counters = model.bench.stats.counters
    if not is_first:
        model.run("euler_ancestral", BATCH)
    addresses = {module: module._v for module in model.names}
    before = replace(counters)
    model.run("euler_ancestral", BATCH)
    assert ({module: module._v for module in model.names} != addresses) == is_first
    blocks, levels = len(model.paged.order._blocks), STEPS
    assert counters.streamed_bytes - before.streamed_bytes == sum(model.moved.values())
    assert counters.prologue_runs - before.prologue_runs == blocks * levels
    assert counters.prologue_reuses - before.prologue_reuses == blocks * (levels - 1)
    assert counters.kept_bytes == before.kept_bytes
    # A block of each structure is loaded once more to be split, if the process has not split such blocks before.
    assert {model.times_moved()[path] for path in spared(model)} <= {1, 1 + is_first}


def test_a_call_with_a_controlnet_looks_at_no_other_noise_level(streaming: Callable[..., Streaming]) -> None:
    model = streaming("Flux")
    model.run("euler_ancestral")
    model.control = {"input": [], "output": []}
    model.run("euler_ancestral")
    assert {model.times_moved()[path] for path in spared(model)} == {STEPS}


def test_a_time_that_the_schedule_does_not_give_is_computed_when_it_comes(
    streaming: Callable[..., Streaming],
) -> None:
    model = streaming("Flux")
    model.run("euler_ancestral")
    model.delay = 0.01
    whole = model.run_whole("euler_ancestral")
    assert torch.equal(model.run("euler_ancestral"), whole)
    assert {model.times_moved()[path] for path in spared(model)} == {STEPS}


def test_a_model_none_of_whose_blocks_splits_streams_whole_and_its_pages_stay(
    core: SimpleNamespace, streaming: Callable[..., Streaming], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = streaming("Flux")
    monkeypatch.setattr(model._split_blocks, "_split", lambda *_: None)
    addresses = {module: module._v for module in model.names}
    counters = model.bench.stats.counters
    before = replace(counters)
    for _ in range(2):
        model.run("euler_ancestral")
        assert set(model.times_moved().values()) == {STEPS}
    assert (counters.prologue_runs, spared(model)) == (before.prologue_runs, set())
    assert {module: module._v for module in model.names} == addresses
