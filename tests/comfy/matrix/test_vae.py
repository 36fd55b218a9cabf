"""Row 9: several VAEs, other layouts of VAEs, and a decode in parts or in tiles."""

from __future__ import annotations

from typing import Any

import pytest

from ..rig import Bench, PromptDict, Run, node, with_vae
from .kit import Check, Recorder
from .test_sizes import OVERLAP, TILE, tiled, tiles

KL, FLUX = "with quant conv", "without quant conv"
# Core reads the number of latent channels from the file; any number works, also 1.
LAYOUTS = [(1, KL), (1, FLUX), (4, KL), (4, FLUX), (16, KL), (16, FLUX)]
any_layout = pytest.mark.parametrize(("channels", "layout"), LAYOUTS)
TINY = node("ResoluteTestTinyVAE", seed=0)
OTHER = node("ResoluteTestTinyVAE", seed=5)


def decode_only(vae: dict[str, Any], seed: int, width: int, height: int, batch: int = 1, channels: int = 4) -> Any:
    """A prompt that decodes random samples; nodes: latent, vae, decode, image."""
    size = {"width": width, "height": height, "batch": batch}
    return {
        "latent": node("ResoluteTestLatent", seed=seed, channels=channels, **size),
        "vae": vae,
        "decode": node("VAEDecode", samples=["latent", 0], vae=["vae", 0]),
        "image": node("SaveImage", images=["decode", 0], filename_prefix="vae"),
    }


def of_layout(channels: int, layout: str) -> dict[str, Any]:
    """A VAE of `pack/vaes.py`; it has four levels, so its blocks differ from the tiny VAE's."""
    return node("ResoluteTestVAE", seed=channels, channels=channels, layout=layout)


def check_decode(check: Check, prompt: PromptDict, **expected: Any) -> Run:
    """Check a prompt without a sampler."""
    return check(prompt, with_vae(prompt, check.backend), **expected)


@pytest.fixture(scope="session")
def layouts_compiled(bench: Bench, recorder: Recorder, warm: Run, seeds: Any) -> Run:
    """The first prompt of the larger VAEs' blocks; no block depends on the number of latent channels."""
    return bench.run(with_vae(decode_only(of_layout(4, KL), next(seeds), 128, 128), recorder.backend))


@pytest.mark.grid(3)
@pytest.mark.usefixtures("layouts_compiled")
@any_layout
def test_any_number_of_latent_channels_runs_the_same_blocks(
    check: Check, seeds: Any, channels: int, layout: str
) -> None:
    for width, height, batch in [(136, 104, 1), (72, 88, 2)]:
        prompt = decode_only(of_layout(channels, layout), next(seeds), width, height, batch, channels)
        run = check_decode(check, prompt, forwards=1)
        assert [image.shape for image in run.images] == [(height, width, 3)] * batch


@pytest.mark.usefixtures("layouts_compiled")
@pytest.mark.parametrize(("channels", "layout"), [(1, KL), (16, FLUX)])
def test_any_number_of_latent_channels_decodes_in_tiles(check: Check, seed: int, channels: int, layout: str) -> None:
    prompt = tiled(decode_only(of_layout(channels, layout), seed, 168, 104, 1, channels))
    check_decode(check, prompt, forwards=tiles(168, 104))


@pytest.mark.parametrize("channels", [4, 16])
def test_a_taesd_decoder_runs_eagerly_and_says_so(check: Check, seeds: Any, channels: int) -> None:
    for width, height, batch in [(136, 104, 1), (72, 88, 2)]:
        prompt = decode_only(of_layout(channels, "taesd"), next(seeds), width, height, batch, channels)
        run = check_decode(check, prompt, forwards=0, bypasses={"no_regions": 1}, eager_calls=1)
        assert run.rise["region_calls"] == 0


def test_a_taesd_decoder_in_tiles_says_so_for_each_tile(check: Check, seed: int) -> None:
    prompt = tiled(decode_only(of_layout(4, "taesd"), seed, 168, 104))
    calls = tiles(168, 104)
    check_decode(check, prompt, forwards=0, bypasses={"no_regions": calls}, eager_calls=calls)


@pytest.mark.long
def test_a_video_decoder_compiles_for_its_first_odd_and_even_number_of_frames(check: Check, seeds: Any) -> None:
    # It decodes one frame, then pairs, then a frame that is left over, and carries frames from call to call in a list.
    # Core's VAE has four levels, so there are many regions.
    sizes = [(64, 64, 3, True), (72, 104, 4, True), (88, 56, 2, False), (56, 72, 5, False)]
    for width, height, frames, is_first in sizes:
        prompt = decode_only(of_layout(16, "video"), next(seeds), width, height)
        size = {"width": width, "height": height, "batch": 1, "frames": frames}
        prompt["latent"] = node("ResoluteTestLatent", seed=next(seeds), channels=16, **size)
        run = check_decode(check, prompt, forwards=1, compiles=is_first)
        assert len(run.images) == 4 * frames - 3


def two_decoders(prompt: PromptDict, vae: dict[str, Any]) -> PromptDict:
    """The prompt, which also decodes the same samples with another VAE."""
    inputs = prompt["decode"]["inputs"]
    return {
        **prompt,
        "second-vae": vae,
        "second-decode": {**prompt["decode"], "inputs": {**inputs, "vae": ["second-vae", 0]}},
        "second-image": node("SaveImage", images=["second-decode", 0], filename_prefix="second"),
    }


def both_compiled(prompt: PromptDict, backend: str) -> PromptDict:
    """The prompt with a Compile VAE Decode for each decoder."""
    ours = with_vae(prompt, backend)
    ours["second-compiled"] = node("ResoluteCompileVAEDecode", vae=["second-vae", 0], backend=backend)
    ours["second-decode"]["inputs"]["vae"] = ["second-compiled", 0]
    return ours


@pytest.mark.parametrize("in_tiles", [False, True], ids=["untiled", "tiled"])
def test_two_vaes_in_one_prompt_compile_nothing(check: Check, tiny_prompt: Any, seeds: Any, in_tiles: bool) -> None:
    for width, height in [(136, 104), (88, 152), (136, 104)]:
        prompt = tiny_prompt(seed=next(seeds), width=width, height=height, steps=1)
        prompt = two_decoders(tiled(prompt) if in_tiles else prompt, OTHER)
        ours = both_compiled(prompt, check.backend)
        ours["compiled"] = node("ResoluteCompileModel", model=["model", 0], backend=check.backend)
        ours["sample"]["inputs"]["model"] = ["compiled", 0]
        run = check(prompt, ours, forwards=1 + 2 * (tiles(width, height) if in_tiles else 1))
        one, other = run.images
        assert abs(one - other).max() > 20, "the two VAEs gave the same image"


@pytest.mark.usefixtures("layouts_compiled")
def test_vaes_of_two_layouts_in_turn_compile_nothing(check: Check, seeds: Any) -> None:
    for vae in (TINY, of_layout(4, FLUX), OTHER, of_layout(4, KL), TINY):
        check_decode(check, decode_only(vae, next(seeds), 104, 72), forwards=1)


def test_a_compiled_vae_leaves_its_input_unchanged(check: Check, seed: int) -> None:
    # Both decode in one prompt, and only one of them uses the cache.
    prompt = two_decoders(decode_only(TINY, seed, 88, 104), TINY)
    prompt["second-decode"]["inputs"]["vae"] = ["vae", 0]
    del prompt["second-vae"]
    check_decode(check, prompt, forwards=1)


def remembered(prompt: PromptDict, changed: dict[str, Any], place: str, backend: str) -> tuple[PromptDict, PromptDict]:
    """The prompt with a node that changes its VAE: plain, and with that node before or after Compile VAE Decode."""
    decode = {**prompt["decode"], "inputs": {**prompt["decode"]["inputs"], "vae": ["changed", 0]}}
    plain = {**prompt, "changed": {**changed, "inputs": {**changed["inputs"], "vae": ["vae", 0]}}, "decode": decode}
    if place == "before":
        return plain, with_vae(plain, backend)
    ours = {**plain, "compiled-vae": node("ResoluteCompileVAEDecode", vae=["vae", 0], backend=backend)}
    ours["changed"] = {**changed, "inputs": {**changed["inputs"], "vae": ["compiled-vae", 0]}}
    return plain, ours


@pytest.mark.grid(3)
@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize(("batch", "at_once", "forwards"), [(5, 2, 3), (4, 1, 4), (7, 3, 3), (3, 8, 1)])
def test_a_batch_that_memory_splits_is_decoded_in_parts(
    check: Check, seed: int, batch: int, at_once: int, forwards: int, place: str
) -> None:
    little_memory = node("ResoluteTestVAEMemory", at_once=at_once)
    prompt = decode_only(TINY, seed, 88, 72, batch)
    run = check(*remembered(prompt, little_memory, place, check.backend), forwards=forwards)
    assert len(run.images) == batch


def test_a_decode_that_runs_out_of_memory_continues_in_tiles(check: Check, seeds: Any) -> None:
    # A latent of 132x8 has 1056 cells. Core's tiles are 64, 32 and 128 wide and overlap by 16.
    limited = node("ResoluteTestVAEOutOfMemory", limit=1024)
    plain, ours = remembered(decode_only(TINY, next(seeds), 1056, 64), limited, "after", check.backend)
    # If captures could be freed, the cache would retry the whole decode once.
    ours["free"] = node("ResoluteFree", any=["latent", 0])
    ours["decode"] = {**ours["decode"], "inputs": {**ours["decode"]["inputs"], "samples": ["free", 0]}}
    check(plain, ours, forwards=3 + 8 + 2)
    check_decode(check, decode_only(TINY, next(seeds), 104, 72), forwards=1)


ENCODERS = {
    "VAEEncode": {},
    "VAEEncodeTiled": {"tile_size": TILE, "overlap": OVERLAP, "temporal_size": 64, "temporal_overlap": 8},
    "VAEEncodeForInpaint": {"mask": ["mask", 0], "grow_mask_by": 6},
}


def edit(encoder: str, seed: int, width: int, height: int) -> PromptDict:
    """A prompt that encodes a picture of noise, and decodes the result."""
    prompt = decode_only(TINY, seed, width, height)
    del prompt["latent"]
    inputs = {"pixels": ["picture", 0], "vae": ["vae", 0], **ENCODERS[encoder]}
    prompt["picture"] = node("ResoluteTestHint", seed=seed, width=width, height=height, batch=1, channels=3)
    # Few columns are masked: in a large flat area stock's own norms are off by more than the tolerance.
    prompt["nothing"] = node("SolidMask", value=0.0, width=width, height=height)
    prompt["columns"] = node("SolidMask", value=1.0, width=4, height=height)
    onto = {"destination": ["nothing", 0], "source": ["columns", 0], "x": 40, "y": 0}
    prompt["mask"] = node("MaskComposite", **onto, operation="add")
    prompt["encode"] = node(encoder, **inputs)
    prompt["samples"] = node("ResoluteTestSaveLatent", samples=["encode", 0], filename_prefix="encoded")
    prompt["decode"]["inputs"]["samples"] = ["encode", 0]
    return prompt


def both_ways(prompt: PromptDict, backend: str) -> PromptDict:
    """The prompt with Compile VAE before its encode and its decode."""
    compiled = node("ResoluteCompileVAE", vae=["vae", 0], backend=backend)
    ours = {**prompt, "compiled": compiled}
    for name in ("encode", "decode"):
        ours[name] = {**prompt[name], "inputs": {**prompt[name]["inputs"], "vae": ["compiled", 0]}}
    return ours


@pytest.fixture(scope="session")
def encoders_compiled(bench: Bench, recorder: Recorder, warm: Run, seeds: Any) -> Run:
    """The first prompt that encodes."""
    return bench.run(both_ways(edit("VAEEncode", next(seeds), 128, 128), recorder.backend))


@pytest.mark.usefixtures("encoders_compiled")
@pytest.mark.parametrize("encoder", ENCODERS)
def test_an_encode_of_any_size_compiles_nothing(check: Check, seeds: Any, encoder: str) -> None:
    for width, height in [(168, 104), (88, 152), (104, 72)]:
        prompt = edit(encoder, next(seeds), width, height)
        encodes = tiles(width, height) if encoder == "VAEEncodeTiled" else 1
        check(prompt, both_ways(prompt, check.backend), forwards=encodes + 1)
