"""Each catalogued transformer gives eager's result, and compiles in its first call only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from .kit import Bench, forget_regions, run_traces
from .models import FIRST, MODELS, SIZES, Size


@pytest.fixture
def bench(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Bench:
    run_traces(core, monkeypatch)
    return Bench(core, MODELS[request.param])


every = pytest.mark.parametrize("bench", list(MODELS), indirect=True)


@every
def test_it_compiles_in_its_first_call_only(bench: Bench) -> None:
    first = bench.check(FIRST)
    assert first["region_calls"] == bench.model.calls
    assert first["region_compiles"] <= bench.model.compiles  # another model of the family may have compiled some
    bench.check_all([*SIZES, Size(2, 6, 10, 19, 3)])


@pytest.mark.grid(2)
@every
def test_other_weights_are_used_at_once(bench: Bench) -> None:
    # What a LoRA does: ComfyUI puts other values, or other parameters, in place of the weights.
    bench.check(FIRST)
    for part in bench.module.modules():
        if isinstance(part, torch.nn.Linear):
            part.weight = torch.nn.Parameter(part.weight + 0.02 * torch.randn_like(part.weight), False)
    assert bench.check(SIZES[0]) == bench.counts()


@pytest.mark.parametrize("bench", [name for name, model in MODELS.items() if model.block], indirect=True)
def test_a_patch_around_a_block_keeps_the_block_compiled(bench: Bench) -> None:
    kind, image = bench.model.block or ("", "")

    def replaced(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = extra["original_block"](args)
        out[image] = out[image] * 0.5 + args[image]  # the block may have written to it
        return out

    options = {"patches_replace": {"dit": {(kind, 0): replaced, (kind, 1): replaced}}}
    bench.check(FIRST)
    bench.check_all([FIRST, *SIZES[:2]], options)  # though core leaves out some arguments then


@pytest.mark.parametrize("bench", ["Wan 2.1", "Qwen-Image", "Flux", "Krea 2"], indirect=True)
def test_a_patch_inside_the_blocks_makes_them_run_eagerly(bench: Bench) -> None:
    seen: list[int] = []

    def patch(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return args[0]["x"] * 0.9 if isinstance(args[0], dict) else {"q": args[0] * 0.9}

    bench.check(FIRST)
    counted = bench.check(FIRST, {"patches": {"attn1_patch": [patch]}}, bypasses={"patched_block": 1})
    assert counted["region_calls"] < bench.model.calls
    assert len(seen) > 0
    assert bench.check(FIRST) == bench.counts()


@pytest.mark.parametrize("bench", ["SVD"], indirect=True)
def test_of_one_frame_the_blocks_over_time_run_eagerly(bench: Bench) -> None:
    bench.check(FIRST)
    for batch in (1, 3):
        counted = bench.check(Size(batch, 8, 12, 7, frames=1), bypasses={"observed_input": 1})
        assert counted == bench.counts(calls=9), batch  # two transformer blocks in each of four, and the last layers
    assert bench.check(SIZES[1]) == bench.counts()


@pytest.mark.parametrize("bench", ["Z-Image"], indirect=True)
def test_an_attention_of_another_node_runs(bench: Bench) -> None:
    def override(attention: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = attention(*args, **kwargs)
        return result * 0.9

    options = {"optimized_attention_override": override}
    assert bench.check(FIRST, options, bypasses={"patched_block": 1})["region_calls"] == 0


@pytest.mark.parametrize("bench", ["Flux"], indirect=True)
def test_its_blocks_can_be_left_out_by_name(bench: Bench, core: SimpleNamespace) -> None:
    left_out = core.ours("blocks.families")
    hooks = core.ours("blocks.families").hooks_of(bench.module, core.roles.UNET, None, None)
    left_out.require_known(["SingleStreamBlock", "double_blocks.1"], hooks)
    with pytest.raises(Exception, match="DoubleStreamBlock, SingleStreamBlock and the places double_blocks"):
        left_out.require_known(["SingleStream"], hooks)


# Regions that a second batch size compiles again. On a CPU torch has two kernels for a convolution over frames alone,
# taken by batch and threads, each with its own layout: inductor expects the wrong one at batch 1.
OVER_FRAMES = {"SVD": 2}


@pytest.mark.long
@pytest.mark.parametrize("name", list(MODELS))
def test_the_lowered_code_serves_every_size_too(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("RESOLUTE_WORKERS", "0")
    forget_regions(core)  # the other tests of this process run traces in place of lowered code
    try:
        bench = Bench(core, MODELS[name])
        assert bench.check(FIRST) == bench.counts(bench.model.compiles)
        assert bench.check(SIZES[0]) == bench.counts(OVER_FRAMES.get(name, 0))
        bench.check_all([*SIZES, Size(2, 6, 10, 19, 3)])
    finally:
        forget_regions(core)
