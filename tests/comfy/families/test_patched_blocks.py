"""Patches of core's own nodes inside blocks: the parts of a block around them are compiled. The result is stock's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from .kit import Bench, forget_regions, run_traces
from .models import MODELS, Size, image, reference

Options = dict[str, Any]


KLEIN = "Flux 2 with a reference"
MORE = {KLEIN: replace(MODELS["Flux 2"], call=image(128, ref_latents=reference(128)))}
# As the node sets it; core takes it with one guidance for all.
REFERENCE = {"ref_latents_method": "index_timestep_zero", "guidance": torch.ones(1)}
SINGLE = [Size(1, 8, 12, 7), Size(1, 10, 6, 13), Size(1, 14, 8, 9)]
PAIRS = [Size(2, 8, 12, 7), Size(4, 10, 6, 13), Size(2, 14, 8, 9)]  # positive and negative, as NAG needs both


@pytest.fixture
def bench(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Bench:
    run_traces(core, monkeypatch)
    forget_regions(core)
    return Bench(core, MORE.get(request.param) or MODELS[request.param])


@pytest.fixture
def patched(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Options]:
    """`patched("NAG")`: the options of a model to which core's node gave its patch."""
    folder = str(core.comfy.__path__[0]).removesuffix("comfy")
    monkeypatch.syspath_prepend(folder)
    nag = importlib.import_module("comfy_extras.nodes_nag").NAGuidance
    cache = importlib.import_module("comfy_extras.nodes_flux").FluxKVCache
    made = importlib.import_module("comfy.model_patcher").ModelPatcher

    def patch(*names: str, **settings: float) -> Options:
        network = torch.nn.Module()
        network.diffusion_model = torch.nn.Module()
        model = made(network, torch.device("cpu"), torch.device("cpu"))
        for name in names:
            if name == "NAG":
                model = nag.execute(model, settings.get("scale", 5.0), 0.5, 1.5).args[0]
            else:
                model = cache.execute(model).args[0]
        options: Options = {**model.model_options["transformer_options"], "cond_or_uncond": [0, 1]}
        return options

    return patch


def check(bench: Bench, size: Size, ours: Options, stocks: Options, **changes: Any) -> dict[str, int]:
    """Compare one call with eager; each has patches of its own, which remember things."""
    torch.manual_seed(1)
    given = {**bench.model.call(size), **changes}
    return bench.compare(lambda: bench.call(given, ours if "_forward" in vars(bench.module) else stocks), {})


@pytest.mark.parametrize("bench", ["Flux", KLEIN, "Chroma"], indirect=True)
def test_nag_is_compiled(bench: Bench, patched: Callable[..., Options]) -> None:
    options, calls = patched("NAG"), 2 * bench.model.calls
    assert bench.check(PAIRS[0], options)["region_calls"] == calls
    for size in PAIRS:
        assert bench.check(size, options) == bench.counts(calls=calls), size
    assert bench.check(PAIRS[0])["region_calls"] == bench.model.calls, "without it, blocks are whole"


@pytest.mark.parametrize(
    ("bench", "names", "sizes"),
    [("Flux", ("cache",), SINGLE), (KLEIN, ("cache",), PAIRS), (KLEIN, ("cache", "NAG"), PAIRS)],
    indirect=["bench"],
)
def test_a_cache_of_keys_and_values_is_compiled(
    bench: Bench, patched: Callable[..., Options], names: tuple[str, ...], sizes: list[Size]
) -> None:
    calls = (1 + len(names)) * bench.model.calls
    for number, size in enumerate(sizes):
        ours, stocks = patched(*names), patched(*names)
        for step in range(3):
            counted = check(bench, size, ours, stocks, **REFERENCE)
            assert counted["region_calls"] == calls, (size, step)
            assert number == 0 or counted["region_compiles"] == 0, (size, step)
