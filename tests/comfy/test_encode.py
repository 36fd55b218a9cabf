"""Compile VAE: encoders through the cache, against eager, at sizes that compile nothing after the first."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from . import vaes
from .families.kit import forget_regions, run_traces
from .in_process import PACK
from .vaes import Compiled, pixels

pytestmark = pytest.mark.usefixtures("inference")

KINDS = {"SDXL": vaes.kl, "Flux": vaes.flux, "Flux.2": vaes.flux2}
# Core crops to the nearest multiple of the compression: 75x93 becomes 72x88, whose latent is 9x11.
SIZES = [(75, 93, 1), (136, 104, 1), (64, 152, 3)]


@pytest.fixture(autouse=True)
def traces(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv("RESOLUTE_WORKERS", "0")
    if "lowered" not in request.node.name:
        run_traces(core, monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_an_encoder_compiles_once_for_all_sizes(core: SimpleNamespace, kind: str) -> None:
    compiled = Compiled(core, KINDS[kind]())
    for number, (width, height, count) in enumerate(SIZES):
        image = pixels(width, height, count)
        rise = compiled.check(lambda vae, image=image: vae.encode(image))
        assert (rise.graph_calls, rise.eager_calls) == (1, 0)
        assert rise.region_calls > 10
        if number:
            assert rise.region_compiles == 0


WAN = {"Qwen-Image": vaes.wan, "Wan 2.2": vaes.wan22}
# Width, height and frames. Four frames become one latent frame, and what is over is cut off.
VIDEOS = {
    "Qwen-Image": [(72, 88, 5), (104, 136, 9), (136, 72, 14)],
    "Wan 2.2": [(80, 112, 5), (144, 96, 9), (112, 48, 6)],
}


@pytest.mark.parametrize("kind", ["Qwen-Image", pytest.param("Wan 2.2", marks=pytest.mark.long)])
def test_an_encoder_of_videos_compiles_once_for_all_sizes_and_lengths(core: SimpleNamespace, kind: str) -> None:
    compiled = Compiled(core, WAN[kind]())
    for number, (width, height, frames) in enumerate(VIDEOS[kind]):
        video = pixels(width, height, frames)
        rise = compiled.check(lambda vae, video=video: vae.encode(video))
        assert (rise.graph_calls, rise.eager_calls) == (1, 0)
        assert rise.region_calls > 10 * (frames - 1) // 4
        assert (rise.region_compiles == 0) == bool(number)


@pytest.mark.parametrize("kind", WAN)
def test_an_encoder_of_videos_encodes_pictures(core: SimpleNamespace, kind: str) -> None:
    compiled = Compiled(core, WAN[kind]())
    for number, (width, height) in enumerate([(80, 112), (144, 96), (96, 80)]):
        rise = compiled.check(lambda vae, size=(width, height): vae.encode(pixels(*size)))
        assert (rise.graph_calls, rise.eager_calls) == (1, 0)
        assert rise.region_calls > 10
        assert number == 0 or rise.region_compiles == 0


@pytest.mark.long
def test_lowered_encoders_compile_nothing_at_other_sizes(core: SimpleNamespace) -> None:
    forget_regions(core)  # those of other tests run their traces
    for make, sizes in [(vaes.kl, SIZES), (vaes.wan, VIDEOS["Qwen-Image"])]:
        compiled = Compiled(core, make())
        for number, (width, height, count) in enumerate(sizes):
            image = pixels(width, height, count)
            rise = compiled.check(lambda vae, image=image: vae.encode(image))
            assert (rise.region_compiles == 0) == bool(number)


def test_an_odd_size_within_the_encoder_compiles_nothing(core: SimpleNamespace) -> None:
    """Core crops what it encodes. Another node may call the encoder with any size: each level then rounds."""
    compiled = Compiled(core, vaes.kl())
    compiled.check(lambda vae: vae.encode(pixels(72, 88)))
    for width, height in [(77, 91), (85, 67)]:
        image = pixels(width, height).movedim(-1, 1) * 2 - 1
        rise = compiled.check(lambda vae, image=image: vae.first_stage_model.encode(image))
        assert rise.region_compiles == 0
        assert rise.region_calls > 10


def test_a_copy_compiles_both_ways_and_the_input_stays_as_it_is(core: SimpleNamespace) -> None:
    vae = vaes.kl()
    compiled = Compiled(core, vae)
    latent = vae.encode(pixels(72, 104))
    rise = compiled.check(lambda vae: vae.decode(latent))
    assert (rise.graph_calls, rise.eager_calls) == (1, 0)
    before = compiled.stats.snapshot()
    assert vae.decode(latent).shape == (1, 104, 72, 3)
    vae.encode(pixels(72, 104))
    assert compiled.stats.snapshot() == before


def test_it_may_come_after_compile_vae_decode_and_before_it(core: SimpleNamespace) -> None:
    module = core.ours("compile.vae")
    ways = (module.compile_vae_decode, module.compile_vae)
    for first, second in (ways, reversed(ways)):
        compiled = Compiled(core, vaes.kl())
        compiled.ours = second(first(compiled.vae, "inductor"), "inductor")
        latent = compiled.vae.encode(pixels(72, 72))
        assert compiled.check(lambda vae: vae.encode(pixels(72, 72))).graph_calls == 1
        assert compiled.check(lambda vae, latent=latent: vae.decode(latent)).graph_calls == 1


def test_a_small_encoder_runs_as_it_is_and_says_so(core: SimpleNamespace) -> None:
    compiled = Compiled(core, vaes.taesd())
    rise = compiled.check(lambda vae: vae.encode(pixels(72, 88)), bypasses={"no_regions": 1})
    assert (rise.region_calls, rise.eager_calls) == (0, 1)


def test_an_encoder_that_another_pack_wrapped_stays_as_that_pack_left_it(
    core: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self, encoder: torch.nn.Module) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, x: torch.Tensor) -> Any:
            return self.encoder(x)

    vae = vaes.kl()
    vae.first_stage_model.encoder = Wrapper(vae.first_stage_model.encoder)
    with caplog.at_level("INFO"):
        compiled = Compiled(core, vae)
    assert "another node put Wrapper" in caplog.text
    assert "around the encoder of this VAE" in caplog.text
    before = compiled.stats.snapshot()
    compiled.ours.encode(pixels(72, 88))
    assert compiled.stats.snapshot()["region_calls"] == before["region_calls"]


def test_a_vae_without_an_encoder_that_resolute_knows_says_so(
    core: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    vae = vaes.kl()
    vae.first_stage_model.encoder = torch.nn.Identity()
    with caplog.at_level("INFO"):
        ours = core.ours("compile.vae").compile_vae(vae, "inductor")
    assert "AutoencoderKL has no encoder that Resolute knows" in caplog.text
    assert list(ours.patcher.object_patches) == ["decoder.forward"]


def test_warm_up_encodes_too(core: SimpleNamespace) -> None:
    compiled = Compiled(core, vaes.kl())
    run, items = core.ours("warm_up.run"), importlib.import_module(f"{PACK}.compile_cache.warm_up_plan").plan
    outcomes = run.warm_up(run.WarmUpInputs(vae=compiled.ours), items("72x88", "1", None))
    assert [(each.what, each.state) for each in outcomes] == [("VAE", "warmed"), ("encoder", "warmed")]
    assert compiled.check(lambda vae: vae.encode(pixels(72, 88))).region_compiles == 0
