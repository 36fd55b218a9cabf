"""A part of one of core's blocks whose class another pack wrote: it may compute anything, so it is in no region."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from .kit import Bench, forget_regions, run_traces
from .models import MODELS, Size


class Gained(torch.nn.Linear):
    """As a pack's own Linear may do, it reads what no module and no option says."""

    gain = [1.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain[0]


def in_the_unet(module: Any) -> torch.nn.Module:
    part: torch.nn.Module = module.middle_block[0].emb_layers[1]
    return part


def test_a_unets_blocks_around_it_run_eagerly(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    run_traces(core, monkeypatch)
    bench = Bench(core, MODELS["SVD"])
    in_the_unet(bench.module).__class__ = Gained
    for gain in (1.0, 1.5):
        monkeypatch.setattr(Gained, "gain", [gain])
        counted = bench.check(Size(1, 8, 8, 5), bypasses={"foreign_model": 1})
        assert 0 < counted["region_calls"] < bench.model.calls


def test_a_decoders_blocks_around_it_run_eagerly(core: SimpleNamespace) -> None:
    kind = importlib.import_module("comfy.ldm.modules.diffusionmodules.model").Decoder
    sizes = {"ch": 32, "ch_mult": (1, 2), "num_res_blocks": 1, "attn_resolutions": [], "resolution": 64}
    decoder = kind(**sizes, out_ch=3, in_channels=3, z_channels=4)

    registry = core.ours("blocks.families")

    def hooked() -> tuple[set[str], list[str]]:
        reasons: list[str] = []
        hooks = registry.hooks_of(decoder, core.roles.VAE_DECODE, None, lambda reason: reasons.append(reason.detail))
        return {name for hook in hooks for _, name in hook.labels}, reasons

    before, none = hooked()
    decoder.mid.block_1.conv1.__class__ = type("Conv2d", (torch.nn.Conv2d,), {"__module__": "strange.ops"})
    after, (reason,) = hooked()
    assert (before - after, none) == ({"mid.block_1"}, [])
    assert reason.startswith("ResnetBlock blocks run eagerly: another pack wrote strange.ops.Conv2d; ")


def test_where_a_kernel_hides_attention_its_blocks_say_so_and_leaving_them_out_costs_no_picture(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_traces(core, monkeypatch)
    attention = importlib.import_module("comfy.ldm.modules.attention")
    monkeypatch.setattr(
        attention, "optimized_attention", lambda *args, **kwargs: attention.attention_pytorch(*args, **kwargs)
    )
    bench = Bench(core, MODELS["SVD"], left_out=("SpatialVideoTransformer",))
    bench._forward.count_regions()
    counted = bench.check(Size(1, 8, 8, 5), bypasses={"replaced_forward": 1})
    assert 0 < counted["region_calls"] < bench.model.calls


def test_a_switch_of_attention_compiles_only_the_blocks_with_attention_anew(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_traces(core, monkeypatch)
    forget_regions(core)
    bench = Bench(core, MODELS["SVD"])
    first = bench.check(Size(1, 8, 8, 5))["region_compiles"]
    torch.backends.cuda.enable_math_sdp(False)
    try:
        again = bench.check(Size(1, 8, 8, 5))
        residual = bench.check(Size(2, 8, 8, 5))
    finally:
        torch.backends.cuda.enable_math_sdp(True)
    assert 0 < again["region_compiles"] < first
    assert (again["region_calls"], residual["region_compiles"]) == (bench.model.calls, 0)
