"""Attention that a person chose: core's own functions are part of compiled blocks, another pack's are not."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from .kit import Bench, forget_regions, run_traces
from .models import FIRST, MODELS, SIZES

NAMES = ("Flux", "Wan 2.1", "Z-Image", "Qwen-Image, masked", "LTX", "SD3.5")

Options = dict[str, Any]


@pytest.fixture
def bench(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Bench:
    run_traces(core, monkeypatch)
    forget_regions(core)
    return Bench(core, MODELS[request.param])


@pytest.fixture
def calls() -> list[str]:
    """The names of the functions that ran."""
    return []


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> Callable[[str, float], Options]:
    """`chosen(name, factor)`: the options of a model to which core gave the function of this name.

    The function halves attention, for example, and Python code of it that a trace followed would be lost.
    """
    attention = importlib.import_module("comfy.ldm.modules.attention")
    patcher = importlib.import_module("comfy.model_patcher").ModelPatcher
    monkeypatch.setattr(attention, "REGISTERED_ATTENTION_FUNCTIONS", dict(attention.REGISTERED_ATTENTION_FUNCTIONS))

    def choose(name: str, factor: float) -> Options:
        def function(*args: Any, **kwargs: Any) -> torch.Tensor:
            calls.append(name)
            result: torch.Tensor = attention.attention_pytorch(*args, **kwargs) * factor
            return result

        attention.REGISTERED_ATTENTION_FUNCTIONS[name] = attention.wrap_attn(function)
        model = SimpleNamespace(model_options={"transformer_options": {}})
        patcher.set_model_optimized_attention(model, attention.REGISTERED_ATTENTION_FUNCTIONS[name])
        given: Options = model.model_options["transformer_options"]
        return given

    return choose


@pytest.mark.grid(3)
@pytest.mark.parametrize("bench", NAMES, indirect=True)
def test_a_function_of_cores_runs_inside_compiled_blocks(
    bench: Bench, chosen: Callable[[str, float], Options], calls: list[str]
) -> None:
    options = chosen("half", 0.5)
    bench.check(FIRST)
    assert bench.check(FIRST, options)["region_calls"] == bench.model.calls
    for size in SIZES:
        calls.clear()
        assert bench.check(size, options) == bench.counts(), size
        assert len(calls) % 2 == 0, "eager's calls, and as many of compiled blocks"
        assert len(calls) > 0
        assert bench.check(size) == bench.counts(), size


@pytest.mark.parametrize("bench", ["Flux"], indirect=True)
def test_two_functions_are_never_confused(bench: Bench, chosen: Callable[[str, float], Options]) -> None:
    half, double = chosen("half", 0.5), chosen("double", 2.0)
    for options in (half, double):
        assert bench.check(FIRST, options) == bench.counts(bench.model.compiles)
    for options in (half, None, double, half, None):
        bench.check(SIZES[0], options)


@pytest.mark.parametrize("bench", ["Flux"], indirect=True)
def test_a_function_that_is_not_registered_makes_blocks_run_eagerly(
    bench: Bench, chosen: Callable[[str, float], Options]
) -> None:
    options = chosen("half", 0.5)
    importlib.import_module("comfy.ldm.modules.attention").REGISTERED_ATTENTION_FUNCTIONS.pop("half")
    assert bench.check(FIRST, options, bypasses={"patched_block": 1})["region_calls"] == 0


@pytest.mark.parametrize("bench", ["Flux", "SVD"], indirect=True)
def test_the_attention_of_a_start_option_is_part_of_the_block(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    """Core's split attention stands for those of other packages, which need a GPU."""
    attention = importlib.import_module("comfy.ldm.modules.attention")
    ours = core.ours("comfyui.chosen_attention")
    bench.check(FIRST)
    monkeypatch.setattr(ours, "_PLAIN", frozenset({"pytorch"}))
    monkeypatch.setattr(core.comfy.model_management, "sage_attention_enabled", lambda: True)
    # The option holds from the start of ComfyUI on, so this is no change within a sampling run.
    for place in (attention, importlib.import_module("comfy.ldm.flux.math")):
        monkeypatch.setattr(place, "optimized_attention", attention.attention_split)
    assert ours.default() == "split"
    bench.begin_run()
    counted = bench.check(FIRST)
    assert 0 < counted["region_compiles"] <= bench.model.compiles  # blocks of a UNet without attention keep their code
    assert counted["region_calls"] == bench.model.calls
    bench.check_all(SIZES)


def function(*args: Any, **kwargs: Any) -> torch.Tensor:
    return importlib.import_module("comfy.ldm.modules.attention").attention_pytorch(*args, **kwargs)


@pytest.mark.parametrize("bench", ["Flux", "SVD"], indirect=True)
@pytest.mark.parametrize("other", ["function", "wrapper", "partial", "object"])
def test_the_reason_names_what_a_pack_put_in_the_place_of_cores_attention(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, bench: Bench, other: str
) -> None:
    attention = importlib.import_module("comfy.ldm.modules.attention")
    others = {
        "function": (function, f"{__name__}.function"),
        "wrapper": (functools.wraps(attention.attention_sub_quad)(function), f"{__name__}.function"),
        "partial": (functools.partial(function), "functools.partial"),
        "object": (Mock(spec=[]), "unittest.mock.Mock"),
    }
    value, name = others[other]
    monkeypatch.setattr(attention, "optimized_attention", value)
    reasons: list[str] = []
    hooks = hooked(core, bench, reasons)
    assert not any("Transformer" in label[0] or "Stream" in label[0] for hook in hooks for label in hook.labels)
    assert reasons == [f"another pack put {name} in the place of ComfyUI's attention; transformer blocks run eagerly"]


def hooked(core: SimpleNamespace, bench: Bench, reasons: list[str]) -> list[Any]:
    hooks: list[Any] = core.ours("blocks.families").hooks_of(
        bench.module, core.roles.UNET, None, lambda reason: reasons.append(reason.detail)
    )
    return hooks


@pytest.mark.parametrize("bench", ["Flux"], indirect=True)
def test_a_block_whose_attention_the_models_file_chose_runs_eagerly(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    """After ComfyUI 0.33 a block may have a `ComfyAttention` with a function; Identity stands for its class."""
    attention = importlib.import_module("comfy.ldm.modules.attention")
    monkeypatch.setattr(attention, "ComfyAttention", torch.nn.Identity, raising=False)
    blocks = [*bench.module.double_blocks, *bench.module.single_blocks]
    for block in blocks:
        block.comfy_attention = torch.nn.Identity()
        block.comfy_attention.function = None
    blocks[0].comfy_attention.function = attention.attention_split
    reasons: list[str] = []
    assert [hook.module for hook in hooked(core, bench, reasons)] == blocks[1:]
    kind = type(blocks[0]).__name__
    assert reasons == [f"the model's file chooses the attention of {kind} blocks (pytorch); they run eagerly"]
    assert bench.check(FIRST, bypasses={"patched_block": 1})["region_calls"] == bench.model.calls - 1


@pytest.mark.parametrize("bench", ["Flux"], indirect=True)
def test_a_capture_has_the_function_in_its_key(bench: Bench, core: SimpleNamespace, chosen: Any) -> None:
    describe = core.ours("patch.call_description").CallDescription
    keys = []
    for options in ({}, chosen("half", 0.5), chosen("double", 2.0)):
        description = describe()
        description.add_options(options, bench.module)
        assert description.policy.reason is None
        keys.append(description.signature())
    assert len(set(map(repr, keys))) == 3
    description = describe()
    description.add_options({"optimized_attention_override": lambda *args, **kwargs: args}, bench.module)
    assert "optimized_attention_override" in description.policy.reason.detail
