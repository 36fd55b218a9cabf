"""Row 1: sizes in random order, sizes that change inside a prompt, and tiled decoding of each."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from ..rig import PromptDict, Run, compiled, node
from .kit import Check

STEPS = 2
TILE, OVERLAP = 128, 32  # pixels
PIXELS = 192 * 256  # limits the time of a drawn size on the CPU


def drawn_sizes(count: int, seed: int = 3) -> list[tuple[int, int]]:
    """Random (width, height): multiples of 8 from 64 to 2048, half of them portrait, of at most PIXELS."""
    draw = random.Random(seed)
    sizes: list[tuple[int, int]] = []
    while len(sizes) < count:
        short = 8 * draw.randint(8, 24)
        long = 8 * draw.randint(short // 8 + 1, min(256, PIXELS // short // 8))
        sizes.append((short, long) if len(sizes) % 2 else (long, short))
    return sizes


SIZES = [*drawn_sizes(8), (64, 64), (64, 2048), (2048, 64)]
any_size = pytest.mark.parametrize(("width", "height"), SIZES, ids=lambda side: str(side))


def image_shapes(run: Run) -> list[tuple[int, ...]]:
    """(height, width, 3) of each image; comparing images alone does not show that the size is right."""
    return [image.shape for image in run.images]


def tiled(prompt: PromptDict) -> PromptDict:
    """The prompt with core's tiled decoder."""
    sizes = {"tile_size": TILE, "overlap": OVERLAP, "temporal_size": 64, "temporal_overlap": 8}
    return {**prompt, "decode": node("VAEDecodeTiled", **prompt["decode"]["inputs"], **sizes)}


def tiles(width: int, height: int) -> int:
    """Number of decodes for one image: three passes, with square, tall and wide tiles."""

    def along(side: int, tile: int) -> int:
        return 1 if side <= tile else math.ceil((side - OVERLAP) / (tile - OVERLAP))

    passes = ((TILE, TILE), (TILE // 2, TILE * 2), (TILE * 2, TILE // 2))
    return sum(along(width, x) * along(height, y) for x, y in passes)


@pytest.mark.grid(5)
@any_size
def test_a_new_size_compiles_nothing(check: Check, tiny_prompt: Any, seed: int, width: int, height: int) -> None:
    run = check(tiny_prompt(seed=seed, width=width, height=height, steps=STEPS), forwards=STEPS + 1)
    assert image_shapes(run) == [(height, width, 3)]


@pytest.mark.grid(4)
@any_size
def test_a_tiled_decode_of_any_size_compiles_nothing(
    check: Check, tiny_prompt: Any, seed: int, width: int, height: int
) -> None:
    prompt = tiled(tiny_prompt(seed=seed, width=width, height=height, steps=1))
    run = check(prompt, forwards=1 + tiles(width, height))
    assert image_shapes(run) == [(height, width, 3)]


def test_repeated_sizes_compile_nothing_in_another_order(check: Check, tiny_prompt: Any, seeds: Any) -> None:
    for width, height in [SIZES[2], SIZES[0], SIZES[1], SIZES[0], SIZES[2]]:
        check(tiny_prompt(seed=next(seeds), width=width, height=height, steps=STEPS), forwards=STEPS + 1)


@pytest.mark.grid(3)
@pytest.mark.parametrize("side", [72, 88, 104, 120, 136])
def test_a_side_that_halves_to_an_odd_number_compiles_nothing(
    check: Check, tiny_prompt: Any, seed: int, side: int
) -> None:
    # Latents of 9, 11, 13, 15 and 17: each level of the UNet rounds up, and upsampling must crop again.
    run = check(tiny_prompt(seed=seed, width=side, height=264 - side, steps=STEPS), forwards=STEPS + 1)
    assert image_shapes(run) == [(264 - side, side, 3)]


UPSCALES = {
    "LatentUpscale": node("LatentUpscale", upscale_method="bilinear", width=200, height=152, crop="disabled"),
    "LatentUpscale-crop": node("LatentUpscale", upscale_method="nearest-exact", width=152, height=200, crop="center"),
    "LatentUpscaleBy": node("LatentUpscaleBy", upscale_method="bislerp", scale_by=1.5),
}


def sampled_twice(prompt: PromptDict) -> PromptDict:
    """Add a second sampler with denoise 0.5 after the node "larger", and decode the first size as "first-decode"."""
    vae = ["vae", 0]
    again = {**prompt["sample"]["inputs"], "latent_image": ["larger", 0], "denoise": 0.5}
    return {
        **prompt,
        "again": node("KSampler", **again),
        "first-decode": node("VAEDecode", samples=["sample", 0], vae=vae),
        "first-image": node("SaveImage", images=["first-decode", 0], filename_prefix="first"),
        "decode": {**prompt["decode"], "inputs": {"samples": ["again", 0], "vae": vae}},
        "samples": {**prompt["samples"], "inputs": {**prompt["samples"]["inputs"], "samples": ["again", 0]}},
    }


def compiled_twice(prompt: PromptDict, backend: str) -> PromptDict:
    """The prompt with one Compile Model for both samplers and one Compile VAE Decode for all decoders."""
    ours = compiled(prompt, backend)
    ours["again"]["inputs"]["model"] = ours["sample"]["inputs"]["model"]
    for name in ("first-decode", "larger"):
        if "vae" in ours[name]["inputs"]:
            ours[name]["inputs"]["vae"] = ours["decode"]["inputs"]["vae"]
    return ours


@pytest.mark.grid(3)
@pytest.mark.parametrize("upscale", UPSCALES.values(), ids=UPSCALES)
@pytest.mark.parametrize("in_tiles", [False, True], ids=["untiled", "tiled"])
def test_hires_fix_in_latent_space_compiles_nothing(
    check: Check, tiny_prompt: Any, seed: int, upscale: dict[str, Any], in_tiles: bool
) -> None:
    small = tiny_prompt(seed=seed, width=120, height=104, steps=STEPS)
    prompt = sampled_twice(small)
    prompt["larger"] = {**upscale, "inputs": {**upscale["inputs"], "samples": ["sample", 0]}}
    width = upscale["inputs"].get("width", 176)  # LatentUpscaleBy: 15 * 1.5 rounds to 22
    height = upscale["inputs"].get("height", 160)  # 13 * 1.5 rounds to 20
    decodes = 1 + (tiles(width, height) if in_tiles else 1)
    prompt = tiled(prompt) if in_tiles else prompt
    run = check(prompt, compiled_twice(prompt, check.backend), forwards=2 * STEPS + decodes)
    assert sorted(image_shapes(run)) == sorted([(104, 120, 3), (height, width, 3)])


@pytest.mark.parametrize("width", [184, 200])
def test_hires_fix_through_pixels_compiles_nothing(check: Check, tiny_prompt: Any, seed: int, width: int) -> None:
    prompt = sampled_twice(tiny_prompt(seed=seed, width=104, height=120, steps=STEPS))
    prompt["scale"] = node(
        "ImageScale", image=["first-decode", 0], upscale_method="bicubic", width=width, height=208, crop="disabled"
    )
    prompt["larger"] = node("VAEEncode", pixels=["scale", 0], vae=["vae", 0])
    run = check(prompt, compiled_twice(prompt, check.backend), forwards=2 * STEPS + 2)
    assert sorted(image_shapes(run)) == sorted([(120, 104, 3), (208, width, 3)])
