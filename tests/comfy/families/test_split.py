"""Blocks of each family, split by what their values depend on: the same bits, without the weights that are spared."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from . import quantized
from .kit import call
from .models import MODELS, Size

# By model and kind of block: the modules whose weights only a prologue reads.
_FLUX = {"DoubleStreamBlock": {"img_mod.lin", "txt_mod.lin"}, "SingleStreamBlock": {"modulation.lin"}}
_QWEN = {"QwenImageTransformerBlock": {"img_mod.1", "txt_mod.1"}}
SPARED: dict[str, dict[str, set[str]]] = {
    "Flux": _FLUX,
    "Kontext": _FLUX,
    "HunyuanVideo": _FLUX,
    "HunyuanVideo 1.5": {"DoubleStreamBlock": _FLUX["DoubleStreamBlock"]},
    "Qwen-Image": _QWEN,
    "Qwen-Image-Edit": _QWEN,
    "Qwen-Image, masked": _QWEN,
    "SD3.5": {"JointBlock": {"context_block.adaLN_modulation.1", "x_block.adaLN_modulation.1"}},
    "AuraFlow": {"MMDiTBlock": {"modC.1", "modX.1"}, "DiTBlock": {"modCX.1"}},
    "Krea 2": {"SingleStreamBlock": {"mod"}},
    "Z-Image": {"JointTransformerBlock": {"adaLN_modulation.0"}},
    "Lumina 2": {"JointTransformerBlock": {"adaLN_modulation.1"}},
    "MiniMax H3": {"DiTBlock": {"adaln_proj.linear"}},
    # One modulation for all blocks, outside of them.
    "Flux 2": {},
    "Chroma": {},
    # Their blocks add a table to a time that is made outside of them.
    "Wan 2.1": {},
    "LTX": {},
}
SIZES = [Size(1, 8, 12, 7), Size(3, 10, 6, 13, 3)]
# Where blocks are counted. In a batch of one torch multiplies tokens and adds the bias in one operator, a trace in two.
# Some CPUs round these differently, and a block whose bits differ stays whole.
BATCHES = (2, 3, 4)


def leaves(result: Any) -> list[Any]:
    """The tensors of a block's result, and what it wrote."""
    return [leaf for each in result for leaf in leaves(each)] if isinstance(result, (tuple, list)) else [result]


@pytest.fixture(autouse=True)
def module_of_sites(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Any:
    """It splits also what spares little: narrow blocks have other shares of weights than wide ones."""
    found = core.inside("backends.inductor.regions.split_sites")
    monkeypatch.setattr(found, "_LEAST_PROLOGUE_ONLY", 0.0)
    return found


@pytest.fixture
def split_sites(module_of_sites: Any) -> Any:
    return module_of_sites.SplitSites()


def hooked(core: SimpleNamespace, module: Any, run_block: Any) -> Any:
    """Inside, `run_block(site, *tensors)` answers each call of a block."""
    installed = importlib.import_module(core.ours("process.module_hooks").Hook.__module__).installed
    hooks = core.ours("blocks.families").hooks_of(module, core.roles.UNET, run_block, lambda reason: None)
    return installed(hooks)


def calls_of_blocks(core: SimpleNamespace, name: str, sizes: Sequence[Size], run: Any) -> None:
    """Call a model, with `run(site, tensors)` before each call of a block."""
    module = MODELS[name].make()

    def run_block(site: Any, *tensors: torch.Tensor) -> Any:
        run(site, tensors)
        return site.function(site.module, *tensors)

    for size in sizes:
        torch.manual_seed(1)
        with hooked(core, module, run_block):
            call(module, MODELS[name].call(size))


@pytest.mark.grid(6)
@pytest.mark.parametrize("name", list(SPARED))
def test_prologue_and_rest_give_the_blocks_bits_without_the_spared_weights(
    core: SimpleNamespace, split_sites: Any, name: str
) -> None:
    found: dict[str, set[str]] = {}

    def run(site: Any, tensors: Sequence[torch.Tensor]) -> None:
        split = split_sites.of(site, tensors)
        if split is None:
            return
        found.setdefault(site.kind, set()).update(split.prologue_only)
        expected = leaves(site.function(site.module, *tensors))
        (kept,) = split.prologue(site.module, [[tensors[index] for index in site.times]])
        prologue_only = [site.module.get_submodule(path) for path in split.prologue_only]
        values = [(part, key, value) for part in prologue_only for key, value in part.named_parameters(recurse=False)]
        try:
            for part, key, value in values:
                part._parameters[key] = torch.nn.Parameter(torch.full_like(value, torch.nan), requires_grad=False)
            actual = leaves(split.rest.function(site.module, *tensors, *kept))
        finally:
            for part, key, value in values:
                part._parameters[key] = value
        assert len(actual) == len(expected)
        assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True) if pair[1] is not None)

    calls_of_blocks(core, name, SIZES[:1] if name == "MiniMax H3" else SIZES, run)
    assert found == SPARED[name]


# How many blocks have a prologue, and whether the time has the pooled text in it.
BLOCKS = {"Flux": (4, True), "SD3.5": (3, True), "Qwen-Image": (2, False), "Z-Image": (4, False)}
# The first block of each call gets the time, so a forward that goes no further shows it.
FORESEEN = ("Flux", "SD3.5", "Qwen-Image")
LEVELS = (0.9, 0.6, 0.3, 0.6)  # heun and dpmpp_sde come back to a noise level


@pytest.mark.grid(2)
@pytest.mark.parametrize(("name", "ahead"), [*[(name, False) for name in BLOCKS], *[(name, True) for name in FORESEEN]])
def test_a_run_has_the_bits_of_the_whole_model_and_each_prologue_runs_once(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str, ahead: bool
) -> None:
    split_blocks = core.ours("dynamic_vram.split_blocks")
    counters = core.ours("dynamic_vram.paged_weights").Counters()
    kept = core.ours("dynamic_vram.paged_weights").PrologueCache(1 << 30, counters)
    lookahead = core.ours("dynamic_vram.timestep_lookahead").TimestepLookahead()
    module_of_kept, reads = importlib.import_module(type(kept).__module__), []
    values_of = module_of_kept.values_of  # type: ignore[attr-defined]
    monkeypatch.setattr(module_of_kept, "values_of", lambda times: reads.append(times) or values_of(times))
    weights = SimpleNamespace(kept=kept, mark_unneeded=lambda modules: None, lookahead=lookahead)

    def run(site: Any, *tensors: torch.Tensor) -> Any:
        return site.function(site.module, *tensors)

    split = split_blocks.SplitBlocks(run, weights, lambda *_: contextlib.nullcontext())

    def run_block(site: Any, *tensors: torch.Tensor) -> Any:
        times = [tensors[index] for index in site.times]
        lookahead.at_block(times)
        return split.run(site, tensors, times) if times else run(site, *tensors)

    module = MODELS[name].make()
    texts: dict[tuple[int, int], dict[str, Any]] = {}
    for batch in BATCHES:
        for prompt in (1, 2):
            torch.manual_seed(prompt)
            texts[batch, prompt] = MODELS[name].call(Size(batch, 8, 10, 7))
    for number, level in enumerate(LEVELS):
        for (batch, _), given in texts.items():
            torch.manual_seed(number)
            x = torch.randn_like(given["x"])
            now = {**given, "x": x, "timestep": torch.full((batch,), level)}
            with hooked(core, module, run):
                expected = call(module, now)
            others = [{**now, "timestep": torch.full((batch,), other)} for other in set(LEVELS) - {level}]
            forwards = [functools.partial(call, module, other) for other in others if ahead]
            with hooked(core, module, run_block), lookahead.with_forwards(lambda forwards=forwards: forwards):
                assert torch.equal(call(module, now), expected)
            if ahead and number == 0:
                in_first_step = counters.prologue_runs
    if ahead:
        assert counters.prologue_runs == in_first_step
    blocks, is_pooled = BLOCKS[name]
    levels, batches, prompts = len(set(LEVELS)), len(BATCHES), 2
    times = levels * batches * (prompts if is_pooled else 1)
    assert counters.prologue_runs == blocks * times
    # Once for a call, and once for each further block of a call that computes.
    computing = batches * (prompts if is_pooled else 1) if ahead else times
    assert len(reads) == len(LEVELS) * batches * prompts + (blocks - 1) * computing


@pytest.mark.parametrize(("least", "splits"), [(0.0, True), (0.9, False)])
def test_a_block_that_spares_little_stays_whole(
    core: SimpleNamespace, module_of_sites: Any, monkeypatch: pytest.MonkeyPatch, least: float, splits: bool
) -> None:
    monkeypatch.setattr(module_of_sites, "_LEAST_PROLOGUE_ONLY", least)
    sites, found = module_of_sites.SplitSites(), []
    calls_of_blocks(core, "Flux", SIZES[1:], lambda site, tensors: found.append(sites.of(site, tensors) is not None))
    assert any(found) is splits


@pytest.mark.parametrize("form", ["int8_tensorwise", "float8_e4m3fn"])
def test_blocks_with_quantized_weights_are_split(core: SimpleNamespace, split_sites: Any, form: str) -> None:
    prologue_only: dict[str, set[str]] = {}

    def run(site: Any, *tensors: torch.Tensor) -> Any:
        split = split_sites.of(site, tensors)  # compares the bits
        if split is not None:
            prologue_only.setdefault(site.kind, set()).update(split.prologue_only)
        return site.function(site.module, *tensors)

    model = quantized.model_of("Flux", form)
    module = model.make()
    with hooked(core, module, run):
        call(module, model.call(SIZES[1]))
    assert prologue_only == _FLUX
