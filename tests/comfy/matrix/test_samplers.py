"""Row 6, first half: what is sampled (images, masks, inpainting models), with which sampler and guider."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from PIL import Image

from scripts.server.process import ComfyServer

from ..rig import PromptDict, assert_different, compile_model, node, with_model, with_sampling
from .kit import Check
from .placing import before_and_after, check_placed

STEPS = 4

# Samplers and their number of model calls in four steps.
SAMPLERS = {
    "dpm_2_ancestral": 7,
    "dpmpp_2m_sde": 4,
    "dpmpp_2s_ancestral": 7,
    "dpmpp_sde": 7,
    "er_sde": 4,
    "euler_ancestral": 4,
    "euler_cfg_pp": 4,
    "heun": 7,
    "lcm": 4,
    "res_multistep": 4,
    "uni_pc": 4,
}


@pytest.fixture(scope="module", autouse=True)
def pictures(server: ComfyServer) -> None:
    """Write to the server's input folder: an image of 136x104, and a mask whose sides are not multiples of eight."""
    noise = numpy.random.default_rng(0)
    ramp = numpy.linspace(0, 160, 136)[None, :, None] + numpy.zeros((104, 1, 3))
    Image.fromarray((ramp + noise.uniform(0, 95, (104, 136, 3))).astype("uint8")).save(
        server.input_folder / "matrix-picture.png"
    )
    mask = numpy.zeros((104, 136), "uint8")
    mask[29:78, 41:103] = 255
    Image.fromarray(numpy.stack([mask] * 3, -1)).save(server.input_folder / "matrix-mask.png")


@pytest.fixture
def pictured(prompt: PromptDict) -> PromptDict:
    """The prompt with nodes for an image, its mask and a VAE, not connected yet."""
    prompt["vae"] = node("ResoluteTestTinyVAE", seed=0)
    prompt["picture"] = node("LoadImage", image="matrix-picture.png")
    prompt["mask"] = node("LoadImageMask", image="matrix-mask.png", channel="red")
    prompt["encoded"] = node("VAEEncode", pixels=["picture", 0], vae=["vae", 0])
    return prompt


def check_against(check: Check, prompt: PromptDict, other: PromptDict, *, forwards: int) -> None:
    """Check a prompt whose image must differ from that of `other`."""
    run = check(prompt, forwards=forwards)
    assert_different(run, check.bench.run(other))


@pytest.mark.parametrize("denoise", [0.5, 0.3])
def test_a_picture_sampled_again_compiles_nothing(check: Check, pictured: Any, denoise: float) -> None:
    ours = with_sampling(pictured, latent_image=["encoded", 0], denoise=denoise)
    check_against(check, ours, with_sampling(pictured, denoise=denoise), forwards=STEPS)


def test_a_noise_mask_protects_its_area_and_compiles_nothing(check: Check, pictured: Any) -> None:
    pictured["masked"] = node("SetLatentNoiseMask", samples=["encoded", 0], mask=["mask", 0])
    masked = with_sampling(pictured, latent_image=["masked", 0])
    check_against(check, masked, with_sampling(pictured, latent_image=["encoded", 0]), forwards=STEPS)


@before_and_after
def test_a_gradual_noise_mask_compiles_nothing(check: Check, pictured: Any, place: str) -> None:
    pictured["half"] = node("SolidMask", value=0.4, width=136, height=104)
    pictured["masked"] = node("SetLatentNoiseMask", samples=["encoded", 0], mask=["half", 0])
    masked = with_sampling(pictured, latent_image=["masked", 0])
    check_placed(check, masked, [node("DifferentialDiffusion", strength=1.0)], place, forwards=STEPS)


def test_encoding_for_inpainting_compiles_nothing(check: Check, pictured: Any) -> None:
    inputs = {"pixels": ["picture", 0], "vae": ["vae", 0], "mask": ["mask", 0], "grow_mask_by": 6}
    pictured["emptied"] = node("VAEEncodeForInpaint", **inputs)
    inpainted = with_sampling(pictured, latent_image=["emptied", 0], denoise=0.9)
    check_against(check, inpainted, with_sampling(pictured, latent_image=["encoded", 0], denoise=0.9), forwards=STEPS)


@pytest.mark.parametrize("noise_mask", [True, False])
def test_an_inpainting_model_sees_mask_and_picture_and_compiles_nothing(
    check: Check, pictured: Any, noise_mask: bool
) -> None:
    # The model has nine input channels, and only the first convolution, which is in no region, reads them.
    pictured["model"] = node("ResoluteTestOtherModel", seed=4, kind="inpaint", channels=0)
    texts = {"positive": ["positive", 0], "negative": ["negative", 0]}
    picture = {"vae": ["vae", 0], "pixels": ["picture", 0], "mask": ["mask", 0]}
    pictured["inpaint"] = node("InpaintModelConditioning", **texts, **picture, noise_mask=noise_mask)
    links = {"positive": ["inpaint", 0], "negative": ["inpaint", 1], "latent_image": ["inpaint", 2]}
    check_against(
        check, with_sampling(pictured, **links), with_sampling(pictured, latent_image=["inpaint", 2]), forwards=STEPS
    )


def test_an_inpainting_model_without_a_picture_compiles_nothing(check: Check, prompt: Any) -> None:
    other = {**prompt}
    prompt["model"] = node("ResoluteTestOtherModel", seed=4, kind="inpaint", channels=0)
    check_against(check, prompt, other, forwards=STEPS)


@pytest.mark.grid(5)
@pytest.mark.parametrize("name", SAMPLERS)
def test_another_sampler_compiles_nothing(check: Check, prompt: Any, name: str) -> None:
    check_against(check, with_sampling(prompt, sampler_name=name), prompt, forwards=SAMPLERS[name])


@pytest.mark.parametrize(("steps", "cfg"), [(2, 1.0), (3, 1.0), (2, 1.8)])
def test_few_steps_of_an_lcm_model_compile_nothing(check: Check, prompt: Any, steps: int, cfg: float) -> None:
    few = {"steps": steps, "cfg": cfg, "sampler_name": "lcm", "scheduler": "sgm_uniform"}
    distilled = node("ModelSamplingDiscrete", sampling="lcm", zsnr=False)
    check_placed(check, with_sampling(prompt, **few), [distilled], "before", forwards=steps)


def guided(prompt: PromptDict, guider: dict[str, Any]) -> PromptDict:
    """The prompt with SamplerCustomAdvanced; the guider gets the model of the prompt's sampler."""
    old = prompt["sample"]["inputs"]
    parts = {
        "guider": {**guider, "inputs": {**guider["inputs"], "model": old["model"]}},
        "noise": node("RandomNoise", noise_seed=old["seed"]),
        "euler": node("KSamplerSelect", sampler_name="euler"),
        "sigmas": node("BasicScheduler", model=old["model"], scheduler="normal", steps=STEPS, denoise=1.0),
    }
    links = {"noise": ["noise", 0], "guider": ["guider", 0], "sampler": ["euler", 0], "sigmas": ["sigmas", 0]}
    return {**prompt, **parts, "sample": node("SamplerCustomAdvanced", **links, latent_image=["latent", 0])}


POSITIVE, NEGATIVE, THIRD = ["positive", 0], ["negative", 0], ["third", 0]
DUAL = {"cond1": POSITIVE, "cond2": THIRD, "negative": NEGATIVE, "cfg_conds": 4.0, "cfg_cond2_negative": 2.0}
GUIDERS = {
    "basic": node("BasicGuider", conditioning=POSITIVE),
    "cfg": node("CFGGuider", positive=POSITIVE, negative=NEGATIVE, cfg=3.0),
    "dual": node("DualCFGGuider", **DUAL, style="regular"),
    "dual nested": node("DualCFGGuider", **DUAL, style="nested"),
    "perpendicular": node(
        "PerpNegGuider", positive=POSITIVE, negative=NEGATIVE, empty_conditioning=THIRD, cfg=4.0, neg_scale=0.7
    ),
}


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", GUIDERS)
def test_another_guider_compiles_nothing(check: Check, prompt: Any, name: str) -> None:
    prompt["third"] = node("ResoluteTestConditioning", seed=13, tokens=77, width=768, pooled_width=0, batch=1)
    plain = guided(prompt, GUIDERS[name])
    ours = with_model(plain, compile_model(check.backend), sampler="guider")
    run = check(plain, ours, forwards=STEPS)
    assert_different(run, check.bench.run(prompt))


def test_a_guider_with_a_model_for_each_prompt_compiles_nothing(check: Check, prompt: Any) -> None:
    if "DualModelGuider" not in check.bench.client.get("/object_info"):
        pytest.skip("this ComfyUI has no DualModelGuider")
    prompt["other"] = node("ResoluteTestTinyModel", seed=7, kind="sd")
    dual = node("DualModelGuider", model_negative=["other", 0], positive=POSITIVE, negative=NEGATIVE, cfg=3.0)
    plain = guided(prompt, dual)
    ours = with_model(plain, compile_model(check.backend), sampler="guider")
    ours["other-compiled"] = node("ResoluteCompileModel", model=["other", 0], backend=check.backend)
    ours["guider"]["inputs"]["model_negative"] = ["other-compiled", 0]
    run = check(plain, ours, forwards=2 * STEPS)
    assert_different(run, check.bench.run(guided(prompt, GUIDERS["cfg"])))


def test_sampling_that_begins_and_ends_in_the_middle_compiles_nothing(check: Check, prompt: Any) -> None:
    old = prompt["sample"]["inputs"]
    kept = {name: old[name] for name in ("model", "positive", "negative", "latent_image", "cfg", "scheduler")}
    middle = {"add_noise": "enable", "start_at_step": 1, "end_at_step": 3, "return_with_leftover_noise": "enable"}
    part = node("KSamplerAdvanced", **kept, **middle, noise_seed=old["seed"], steps=6, sampler_name="euler")
    check_against(check, {**prompt, "sample": part}, prompt, forwards=2)
