"""Row 6, second half: nodes that change how a model is sampled, before and after Compile Model."""

from __future__ import annotations

from typing import Any

import pytest

from ..rig import PromptDict, assert_different, compile_model, compiled, flux_prompt, node, with_model, with_sampling
from .kit import Check
from .placing import before_and_after, check_placed

STEPS = 4

# Nodes that replace model_sampling: the meaning of a model's output, and its noise levels.
SAMPLINGS = {
    "eps zsnr": node("ModelSamplingDiscrete", sampling="eps", zsnr=True),
    "v": node("ModelSamplingDiscrete", sampling="v_prediction", zsnr=False),
    "v zsnr": node("ModelSamplingDiscrete", sampling="v_prediction", zsnr=True),
    "lcm": node("ModelSamplingDiscrete", sampling="lcm", zsnr=False),
    "edm": node("ModelSamplingContinuousEDM", sampling="edm", sigma_max=80.0, sigma_min=0.002),
    "continuous v": node("ModelSamplingContinuousV", sampling="v_prediction", sigma_max=500.0, sigma_min=0.03),
    "flow": node("ModelSamplingSD3", shift=3.0),
}
# Nodes that act on the results of forwards or between blocks; they must not cause a bypass.
OUTSIDE = {
    "RescaleCFG": node("RescaleCFG", multiplier=0.8),
    "FreeU": node("FreeU", b1=1.4, b2=1.6, s1=0.7, s2=0.3),
    "FreeU_V2": node("FreeU_V2", b1=1.5, b2=1.6, s1=0.7, s2=0.3),
    "CFGZeroStar": node("CFGZeroStar"),
}
STEP_CACHES = {
    "EasyCache": node("EasyCache", reuse_threshold=0.5, start_percent=0.1, end_percent=0.9, verbose=False),
    "LazyCache": node("LazyCache", reuse_threshold=0.5, start_percent=0.1, end_percent=0.9, verbose=False),
}
# Patches inside transformer blocks: the node, the forwards of four steps, and how many of them have patched blocks.
# Perturbed attention adds a second forward, and only that is patched; self-attention guidance patches both forwards.
INSIDE = {
    "PerturbedAttentionGuidance": (node("PerturbedAttentionGuidance", scale=3.0), 2 * STEPS, STEPS),
    "SelfAttentionGuidance": (node("SelfAttentionGuidance", scale=0.8, blur_sigma=2.0), 2 * STEPS, 2 * STEPS),
    "HyperTile": (node("HyperTile", tile_size=64, swap_size=2, max_depth=1, scale_depth=False), STEPS, STEPS),
    "TomePatchModel": (node("TomePatchModel", ratio=0.4), STEPS, STEPS),
}
MERGES = {
    "ModelMergeSimple": node("ModelMergeSimple", ratio=0.6),
    "ModelMergeBlocks": node("ModelMergeBlocks", input=0.9, middle=0.3, out=0.5),
    "ModelMergeAdd": node("ModelMergeAdd"),
}


@pytest.mark.grid(12)
@before_and_after
@pytest.mark.parametrize("name", [*SAMPLINGS, *OUTSIDE, *INSIDE])
def test_another_prediction_or_guidance_bypasses_only_the_blocks_that_it_is_inside_of(
    check: Check, prompt: Any, name: str, place: str
) -> None:
    other, forwards, patched = INSIDE.get(name) or ({**SAMPLINGS, **OUTSIDE}[name], STEPS, 0)
    if patched:  # HyperTile does nothing at a size that it cannot divide into tiles.
        prompt["latent"]["inputs"].update(width=256, height=256)
    if name == "TomePatchModel":  # It merges the most similar tokens: rounding chooses others at 5 seeds of 92.
        prompt["sample"]["inputs"]["seed"] = 900 + (place == "after")
    bypasses = {"patched_block": patched} if patched else {}
    check_placed(check, prompt, [other], place, forwards=forwards, bypasses=bypasses)


@pytest.mark.grid(2)
@before_and_after
@pytest.mark.parametrize("name", STEP_CACHES)
def test_a_step_cache_skips_the_same_steps(check: Check, prompt: Any, name: str, place: str) -> None:
    steps = 12
    prompt["sample"]["inputs"]["steps"] = steps
    eager = check.bench.run(with_model(prompt, STEP_CACHES[name], compile_model("eager")))
    calls = eager.rise["eager_calls"]
    assert 0 < calls < steps, "some steps must be skipped, but not all"
    check_placed(check, prompt, [STEP_CACHES[name]], place, forwards=calls)


def test_a_step_cache_skips_the_same_steps_of_a_transformer(
    check: Check, prompt: Any, make_model: Any, seeds: Any
) -> None:
    steps = 12
    prompt = with_sampling(flux_prompt(prompt, make_model("flux-tiny")), steps=steps)
    check.bench.run(compiled(prompt, check.backend))  # no test before compiled it, or one did
    check(prompt, forwards=steps)
    for step_cache in STEP_CACHES.values():
        for place in ("before", "after"):
            prompt["sample"]["inputs"]["seed"] = next(seeds)
            calls = check.bench.run(with_model(prompt, step_cache, compile_model("eager"))).rise["eager_calls"]
            assert 0 < calls < steps, "some steps must be skipped, but not all"
            check_placed(check, prompt, [step_cache], place, forwards=calls)


def test_free_u_is_added_and_removed_without_a_compile(check: Check, prompt: Any, seeds: Any) -> None:
    # For comparison: core's own compile node keeps using the graph that was compiled without FreeU.
    check(prompt, forwards=STEPS)
    for place in ("after", "before"):
        prompt["sample"]["inputs"]["seed"] = next(seeds)
        check_placed(check, prompt, [OUTSIDE["FreeU_V2"]], place, forwards=STEPS)
        prompt["sample"]["inputs"]["seed"] = next(seeds)
        check(prompt, forwards=STEPS)


def test_several_such_nodes_before_and_after_all_take_effect(check: Check, prompt: Any) -> None:
    first, second = [OUTSIDE["FreeU"], SAMPLINGS["v"]], [OUTSIDE["RescaleCFG"], INSIDE["PerturbedAttentionGuidance"][0]]
    plain = with_model(prompt, *first, *second)
    ours = with_model(prompt, *first, compile_model(check.backend), *second)
    run = check(plain, ours, forwards=2 * STEPS, bypasses={"patched_block": STEPS})
    for fewer in (first, second):
        assert_different(run, check.bench.run(with_model(prompt, *fewer)))


def merged(prompt: PromptDict, merge: dict[str, Any], place: str, backend: str | None) -> PromptDict:
    """The prompt with a merge of two models. place: whether the merge or its input models are compiled."""
    compiles = {"model1": ["model", 0], "model2": ["other", 0]}
    parts = {"other": node("ResoluteTestTinyModel", seed=3, kind="sd")}
    if backend is not None and place == "after":
        for name, link in compiles.items():
            parts[f"{name}-compiled"] = node("ResoluteCompileModel", model=link, backend=backend)
            compiles[name] = [f"{name}-compiled", 0]
    parts["merge"] = {**merge, "inputs": {**merge["inputs"], **compiles}}
    sample = {**prompt["sample"], "inputs": {**prompt["sample"]["inputs"], "model": ["merge", 0]}}
    changed = {**prompt, **parts, "sample": sample}
    return with_model(changed, compile_model(backend)) if backend is not None and place == "before" else changed


@pytest.mark.grid(3)
@before_and_after
@pytest.mark.parametrize("name", MERGES)
def test_merged_weights_compile_nothing_and_are_removed_again(check: Check, prompt: Any, name: str, place: str) -> None:
    # A merge patches weights like a LoRA: at load, into new Parameters.
    plain = merged(prompt, MERGES[name], place, None)
    run = check(plain, merged(prompt, MERGES[name], place, check.backend), forwards=STEPS)
    original = check(prompt, forwards=STEPS)
    assert_different(run, original)
