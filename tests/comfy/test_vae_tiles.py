"""A VAE in core's tiles: as stock's, nothing compiles after the first, and a size is captured when it comes again."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.video_models import loaded_vae

from . import vaes
from .families.kit import forget_regions, run_traces
from .vaes import Compiled, pixels

pytestmark = pytest.mark.usefixtures("inference")

MOST_SIZES = 12  # three passes of other tiles, each with a whole tile, two edges and a corner
TILE = {"tile_x": 8, "tile_y": 8, "overlap": 2}  # cells of a latent
PIXELS = {"tile_x": 64, "tile_y": 64, "overlap": 16}
# Frames of the latent, and its cells; tiles of a video have frames too.
VIDEO_TILE = {**TILE, "tile_t": 3, "overlap_t": 1}
VIDEO_PIXELS = {**PIXELS, "tile_t": 9, "overlap_t": 4}
VIDEO_SIZES = [(5, 11, 9), (4, 9, 13), (3, 13, 7)]


@pytest.fixture
def compiled(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """A small VAE behind Compile VAE, whose regions are traced and not lowered."""
    run_traces(core, monkeypatch)
    return Compiled(core, vaes.tiny())


@pytest.fixture
def video(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """A small VAE of videos behind Compile VAE, whose regions are traced and not lowered."""
    run_traces(core, monkeypatch)
    forget_regions(core)
    return Compiled(core, vaes.wan())


def latent(height: int, width: int) -> torch.Tensor:
    return torch.randn((1, 4, height, width), generator=torch.Generator().manual_seed(height))


def frames(count: int, height: int, width: int) -> torch.Tensor:
    return torch.randn((1, 16, count, height, width), generator=torch.Generator().manual_seed(height))


class Case(NamedTuple):
    """A call in tiles of a latent of each size. least: calls of the VAE's part in each."""

    kind: str
    sizes: list[tuple[int, ...]]
    least: int
    call: Callable[..., torch.Tensor]


# All tiles of the second size differ from those of the first, but for the whole ones.
SIZES: list[tuple[int, ...]] = [(19, 23), (17, 13)]
CASES = {
    "a decode": Case("compiled", SIZES, MOST_SIZES, lambda vae, *size: vae.decode_tiled(latent(*size), **TILE)),
    "an encode": Case(
        "compiled", SIZES, MOST_SIZES, lambda vae, h, w: vae.encode_tiled(pixels(8 * w, 8 * h), **PIXELS)
    ),
    "a decode of a video": Case(
        "video", [*VIDEO_SIZES], 2, lambda vae, *size: vae.decode_tiled(frames(*size), **VIDEO_TILE)
    ),
    "an encode of a video": Case(
        "video", [*VIDEO_SIZES[:2]], 4,
        lambda vae, t, h, w: vae.encode_tiled(pixels(8 * w, 8 * h, 4 * t - 3), **VIDEO_PIXELS),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_call_in_tiles_is_stocks_and_compiles_once_for_all_tiles(
    core: SimpleNamespace, request: pytest.FixtureRequest, name: str
) -> None:
    case = CASES[name]
    compiled: Compiled = request.getfixturevalue(case.kind)
    forget_regions(core)
    for number, size in enumerate(case.sizes):
        before = compiled.stats.counters.signatures
        rise = compiled.check(lambda vae, size=size: case.call(vae, *size))
        assert rise.eager_calls == 0
        assert rise.graph_calls >= case.least
        assert rise.region_compiles == 0 or not number or "a video" in name  # which has tiles of other lengths
        if case.kind == "compiled":
            assert compiled.stats.counters.signatures - before <= MOST_SIZES
    for size in case.sizes:
        assert compiled.check(lambda vae, size=size: case.call(vae, *size)).region_compiles == 0, size


@pytest.mark.long
@pytest.mark.parametrize("name", ["hunyuan", "hunyuan15", "wan22", "cosmos", "mochi"])
def test_each_decoder_of_videos_is_stocks_in_tiles(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run_traces(core, monkeypatch)
    compiled = Compiled(core, loaded_vae(name, is_small=True))
    channels = compiled.vae.latent_channels
    for number, size in enumerate([(5, 9, 11), (4, 11, 9)]):
        latents = torch.randn((1, channels, *size), generator=torch.Generator().manual_seed(number))
        rise = compiled.check(lambda vae, latents=latents: vae.decode_tiled(latents, **VIDEO_TILE))
        assert rise.eager_calls == 0
        assert rise.graph_calls > 1
        assert number == 0 or rise.region_compiles == 0


class Short:
    """The memory of a VAE that is enough for tiles, and for nothing larger."""

    def __init__(self, part: str, most: int) -> None:
        """part: with the convolution that runs out of memory. most: numbers in a plane that it takes."""
        self.part, self.most, self.failed = part, most, 0

    def __call__(self, vae: Any) -> Any:
        short = copy.copy(vae)
        short.patcher = vae.patcher.clone()
        name = f"{self.part}.forward"
        inner = short.patcher.get_model_object(name)

        def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if math.prod(x.shape[-2:]) > self.most:
                self.failed += 1
                raise torch.cuda.OutOfMemoryError("asked to run out of memory")
            return inner(x, *args, **kwargs)

        short.patcher.add_object_patch(name, forward)
        return short


# What runs out of memory, and a call of a kind of VAE that needs more. Core's largest tiles have 128 cells, or 1024
# pixels; of a video 32 cells, or 256 pixels where core knows no better.
CALLS: dict[tuple[str, str], tuple[int, Callable[[Any], torch.Tensor]]] = {
    ("compiled", "decoder.conv_in"): (128 * 9, lambda vae: vae.decode(latent(130, 9))),
    ("compiled", "encoder.conv_in"): (1024 * 72, lambda vae: vae.encode(pixels(72, 1032))),
    ("video", "decoder.conv1"): (32 * 5, lambda vae: vae.decode(frames(3, 37, 5))),
    ("video", "encoder.conv1"): (512 * 40, lambda vae: vae.encode(pixels(40, 520, 5))),
}


@pytest.mark.parametrize(("kind", "part"), CALLS)
def test_a_call_that_runs_out_of_memory_continues_in_tiles_as_cores_does(
    request: pytest.FixtureRequest, kind: str, part: str
) -> None:
    compiled: Compiled = request.getfixturevalue(kind)
    most, call = CALLS[kind, part]
    short = Short(part, most)
    compiled.vae, compiled.ours = short(compiled.vae), short(compiled.ours)
    rise = compiled.check(call)
    assert short.failed >= 2  # of both
    assert rise.graph_calls > 1


def test_a_tile_is_told_from_a_whole_picture(
    core: SimpleNamespace, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles, told = core.ours("patch.tile_sizes"), list[bool]()
    inner = tiles.is_tile

    def is_tile() -> bool:
        told.append(inner())
        return told[-1]

    monkeypatch.setattr(tiles, "is_tile", is_tile)
    compiled.ours.decode(latent(9, 11))
    compiled.ours.encode(pixels(72, 88))
    torch.no_grad()(compiled.ours.decode)(latent(9, 11))  # as in many nodes; core's function has such a decorator too
    assert told
    assert not any(told)
    told.clear()
    compiled.ours.decode_tiled(latent(9, 11), **TILE)
    compiled.ours.encode_tiled(pixels(72, 88), **PIXELS)
    assert told
    assert all(told)


def test_a_size_of_tiles_is_captured_when_it_comes_again(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, describe = core.ours("patch.tile_sizes").TileSizes(), core.ours("patch.call_description").CallDescription

    def described(side: int) -> Any:
        description = describe()
        description.add("latent", torch.zeros((1, 4, side, side)))
        sizes.describe(description)
        return description

    assert described(16).policy.may_capture  # a whole picture
    monkeypatch.setattr(core.ours("patch.tile_sizes"), "is_tile", lambda: True)
    assert [described(side).policy.may_capture for side in (16, 8, 16, 8, 16)] == [False, False, True, True, True]
    assert described(16).why_captured
