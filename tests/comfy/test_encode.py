"""Compile VAE: encoders through the cache, against eager, at sizes that compile nothing after the first."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from . import vaes
from .families.kit import forget_regions, run_traces
from .vaes import Compiled, pixels

pytestmark = pytest.mark.usefixtures("inference")

# Width, height and frames or pictures. Core crops to the nearest multiple of the compression: 75x93 becomes 72x88 with
# a latent of 9x11. Four frames of a video become one latent frame, and what is over is cut off.
SIZES = [(75, 93, 1), (136, 104, 1), (64, 152, 3)]
PICTURES = [(80, 112, 1), (144, 96, 1), (96, 80, 1)]
VIDEOS = [(72, 88, 5), (104, 136, 9), (136, 72, 14)]
VIDEOS_OF_22 = [(80, 112, 5), (144, 96, 9), (112, 48, 6)]
CASES: dict[str, tuple[Callable[[], Any], list[tuple[int, int, int]]]] = {
    "SDXL": (vaes.kl, SIZES),
    "Flux": (vaes.flux, SIZES),
    "Flux.2": (vaes.flux2, SIZES),
    "Qwen-Image, a picture": (vaes.wan, PICTURES),
    "Qwen-Image, a video": (vaes.wan, VIDEOS),
    "Wan 2.2, a picture": (vaes.wan22, PICTURES),
    "Wan 2.2, a video": (vaes.wan22, VIDEOS_OF_22),
}
LONG = ("Wan 2.2, a video",)


@pytest.fixture(autouse=True)
def traces(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv("RESOLUTE_WORKERS", "0")
    if "lowered" not in request.node.name:
        run_traces(core, monkeypatch)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in CASES]
)
def test_an_encoder_compiles_once_for_all_sizes_and_lengths(core: SimpleNamespace, name: str) -> None:
    make, sizes = CASES[name]
    compiled = Compiled(core, make())
    lengths: set[int] = set()
    for width, height, count in sizes:
        image = pixels(width, height, count)
        rise = compiled.check(lambda vae, image=image: vae.encode(image))
        assert (rise.graph_calls, rise.eager_calls) == (1, 0)
        chunks = (count - 1) // 4 if "video" in name else 1
        assert rise.region_calls > 10 * chunks
        # Another length may bring blocks into a state that no shorter video has.
        is_new = not lengths or ("video" in name and count not in lengths)
        lengths.add(count)
        assert is_new or rise.region_compiles == 0
    for width, height, count in sizes:
        image = pixels(width, height, count)
        assert compiled.check(lambda vae, image=image: vae.encode(image)).region_compiles == 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["SDXL", "Qwen-Image, a video"])
def test_lowered_encoders_compile_nothing_at_other_sizes(core: SimpleNamespace, name: str) -> None:
    forget_regions(core)  # those of other tests run their traces
    make, sizes = CASES[name]
    compiled = Compiled(core, make())
    for is_again in (False, True):
        for width, height, count in sizes:
            image = pixels(width, height, count)
            rise = compiled.check(lambda vae, image=image: vae.encode(image))
            assert rise.region_compiles == 0 or not is_again


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
    module = core.ours("patch.vae")
    ways = (module.compile_vae_decode, module.compile_vae)
    for first, second in (ways, reversed(ways)):
        compiled = Compiled(core, vaes.kl())
        compiled.ours = second(first(compiled.vae, "inductor"), "inductor")
        latent = compiled.vae.encode(pixels(72, 72))
        assert compiled.check(lambda vae: vae.encode(pixels(72, 72))).graph_calls == 1
        assert compiled.check(lambda vae, latent=latent: vae.decode(latent)).graph_calls == 1


def test_a_small_encoder_runs_eagerly_and_says_so(core: SimpleNamespace) -> None:
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
        ours = core.ours("patch.vae").compile_vae(vae, "inductor")
    assert "AutoencoderKL has no encoder that Resolute knows" in caplog.text
    assert list(ours.patcher.object_patches) == ["decoder.forward"]


def test_warm_up_encodes_too(core: SimpleNamespace) -> None:
    compiled = Compiled(core, vaes.kl())
    run, items = core.ours("warm_up.run"), core.inside("warm_up_plan").plan
    outcomes = run.warm_up(run.WarmUpInputs(vae=compiled.ours), items("72x88", "1", None))
    assert [(each.what, each.state) for each in outcomes] == [("VAE", "warmed"), ("encoder", "warmed")]
    assert compiled.check(lambda vae: vae.encode(pixels(72, 88))).region_compiles == 0
