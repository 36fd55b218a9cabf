"""A VAE in core's tiles: as stock's, nothing compiles after the first, and a size is captured when it comes again."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

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
# Cells of a latent. All tiles of the second differ from those of the first, but for the whole ones.
SIZES = [(19, 23), (17, 13)]


@pytest.fixture
def compiled(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """A small VAE behind Compile VAE, whose regions are traced and not lowered."""
    run_traces(core, monkeypatch)
    return Compiled(core, vaes.tiny())


def latent(height: int, width: int) -> torch.Tensor:
    return torch.randn((1, 4, height, width), generator=torch.Generator().manual_seed(height))


def test_a_tiled_decode_is_stocks_and_compiles_once_for_all_tiles(core: SimpleNamespace, compiled: Compiled) -> None:
    forget_regions(core)
    for number, size in enumerate(SIZES):
        before = compiled.stats.counters.signatures
        rise = compiled.check(lambda vae, size=size: vae.decode_tiled(latent(*size), **TILE))
        assert rise.eager_calls == 0
        assert rise.graph_calls >= MOST_SIZES
        assert compiled.stats.counters.signatures - before <= MOST_SIZES
        assert (rise.region_compiles == 0) == bool(number)


def test_a_tiled_encode_is_stocks_and_compiles_once_for_all_tiles(core: SimpleNamespace, compiled: Compiled) -> None:
    forget_regions(core)
    for number, (height, width) in enumerate(SIZES):
        image = pixels(8 * width, 8 * height)
        rise = compiled.check(lambda vae, image=image: vae.encode_tiled(image, **PIXELS))
        assert rise.eager_calls == 0
        assert rise.graph_calls >= MOST_SIZES
        assert (rise.region_compiles == 0) == bool(number)


# Frames of the latent, and its cells; tiles of a video have frames too.
VIDEO_TILE = {"tile_x": 8, "tile_y": 8, "overlap": 2, "tile_t": 3, "overlap_t": 1}
VIDEO_SIZES = [(5, 11, 9), (4, 9, 13), (3, 13, 7)]
VIDEO_PIXELS = {"tile_x": 64, "tile_y": 64, "overlap": 16, "tile_t": 9, "overlap_t": 4}


@pytest.fixture
def video(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """A small VAE of videos behind Compile VAE, whose regions are traced and not lowered."""
    run_traces(core, monkeypatch)
    forget_regions(core)
    return Compiled(core, vaes.wan())


def frames(count: int, height: int, width: int) -> torch.Tensor:
    return torch.randn((1, 16, count, height, width), generator=torch.Generator().manual_seed(height))


def test_a_video_in_tiles_is_stocks_and_compiles_once_for_all_tiles(video: Compiled) -> None:
    for number, size in enumerate(VIDEO_SIZES):
        rise = video.check(lambda vae, size=size: vae.decode_tiled(frames(*size), **VIDEO_TILE))
        assert rise.eager_calls == 0
        assert rise.graph_calls > 1
        assert (rise.region_compiles == 0) == bool(number)


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


def test_a_video_is_encoded_in_tiles_as_stocks_and_compiles_once_for_all_tiles(video: Compiled) -> None:
    for number, (count, height, width) in enumerate(VIDEO_SIZES[:2]):
        image = pixels(8 * width, 8 * height, 4 * count - 3)
        rise = video.check(lambda vae, image=image: vae.encode_tiled(image, **VIDEO_PIXELS))
        assert rise.eager_calls == 0
        assert rise.graph_calls > 3
        assert (rise.region_compiles == 0) == bool(number)


class Short:
    """The memory of a VAE that is enough for tiles, and for nothing larger."""

    def __init__(self, part: str, most: int) -> None:
        """part: with the convolution that runs out of memory. most: numbers in a plane that it takes."""
        self.part, self.most, self.failed = part, most, 0

    def __call__(self, vae: Any) -> Any:
        short = importlib.import_module("copy").copy(vae)
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


CALLS: dict[str, tuple[int, Callable[[Any], torch.Tensor]]] = {
    # Core's largest tiles have 128 cells, or 1024 pixels.
    "decoder.conv_in": (128 * 9, lambda vae: vae.decode(latent(130, 9))),
    "encoder.conv_in": (1024 * 72, lambda vae: vae.encode(pixels(72, 1032))),
}
# Of a video 32 cells, or 256 pixels where core knows no better.
VIDEO_CALLS: dict[str, tuple[int, Callable[[Any], torch.Tensor]]] = {
    "decoder.conv1": (32 * 5, lambda vae: vae.decode(frames(3, 37, 5))),
    "encoder.conv1": (512 * 40, lambda vae: vae.encode(pixels(40, 520, 5))),
}


@pytest.mark.parametrize("part", CALLS)
def test_a_call_that_runs_out_of_memory_continues_in_tiles_as_cores_does(compiled: Compiled, part: str) -> None:
    _check_without_memory(compiled, part, *CALLS[part])


@pytest.mark.parametrize("part", VIDEO_CALLS)
def test_a_video_that_runs_out_of_memory_continues_in_tiles_as_cores_does(video: Compiled, part: str) -> None:
    _check_without_memory(video, part, *VIDEO_CALLS[part])


def _check_without_memory(compiled: Compiled, part: str, most: int, call: Callable[[Any], torch.Tensor]) -> None:
    short = Short(part, most)
    compiled.vae, compiled.ours = short(compiled.vae), short(compiled.ours)
    rise = compiled.check(call)
    assert short.failed >= 2  # of both
    assert rise.graph_calls > 1


def test_a_tile_is_told_from_a_whole_picture(
    core: SimpleNamespace, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles, told = core.ours("comfyui.vae_tiles"), list[bool]()
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
    sizes, describe = core.ours("forward.tile_sizes").TileSizes(), core.ours("forward.call_description").CallDescription

    def described(side: int) -> Any:
        description = describe()
        description.add("latent", torch.zeros((1, 4, side, side)))
        sizes.describe(description)
        return description

    assert described(16).may_capture  # a whole picture
    monkeypatch.setattr(core.ours("comfyui.vae_tiles"), "is_tile", lambda: True)
    assert [described(side).may_capture for side in (16, 8, 16, 8, 16)] == [False, False, True, True, True]
    assert described(16).why_captured
