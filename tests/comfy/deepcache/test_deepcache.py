"""DeepCache in ComfyUI: whatever is sampled and however, it is the plain loop, alone and compiled on either side."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.errors import PromptError

from ..matrix.controlling import controlled, with_compiled_nets
from ..rig import Bench, PromptDict, assert_different, node, with_sampling, without_decoder
from .kit import COMPILE, DEEPCACHE, LATENT_TOLERANCE, REFERENCE, Check, assert_equal_latents, changed

FULL, FAST = 4, 6  # of ten steps, at interval 3
SHARED = (FULL, FAST)  # positive and negative prompt in one batch
SPLIT = (2 * FULL, 2 * FAST)
WHOLE = {"tokens": 77, "width": 768, "pooled_width": 0, "batch": 1}
LEFT = {"width": 72, "height": 104, "x": 0, "y": 0, "strength": 0.8}


def conditioned(prompt: PromptDict, change: dict[str, Any], tokens: int = 77) -> PromptDict:
    """The positive conditioning, and beside it another one of which `change` makes something."""
    changed_other = {**change, "inputs": {**change["inputs"], "conditioning": ["other", 0]}}
    return {
        **with_sampling(prompt, positive=["both", 0]),
        "other": node("ResoluteTestConditioning", seed=21, **{**WHOLE, "tokens": tokens}),
        "changed": changed_other,
        "both": node("ConditioningCombine", conditioning_1=["positive", 0], conditioning_2=["changed", 0]),
    }


def sampled_again(prompt: PromptDict, **inputs: Any) -> PromptDict:
    """The latent enlarged and sampled once more by the same model."""
    first = prompt["sample"]["inputs"]
    enlarged = node(
        "LatentUpscale", samples=["sample", 0], upscale_method="bilinear", width=200, height=152, crop="disabled"
    )
    again = {**first, "latent_image": ["enlarged", 0], "denoise": 0.6, "steps": 12, **inputs}
    saved = node("ResoluteTestSaveLatent", samples=["again", 0], filename_prefix="again")
    return {**prompt, "enlarged": enlarged, "again": {"class_type": "KSampler", "inputs": again}, "saved": saved}


def test_each_pass_is_a_graph_of_its_own_and_both_have_the_same_regions(
    check: Check, prompt: PromptDict, bench: Bench
) -> None:
    prompt["latent"]["inputs"].update(width=152, height=88)
    run, signatures = bench.signatures(changed(prompt, DEEPCACHE, COMPILE))
    assert [text.split()[0] for text in signatures] == ["deepcache_full", "deepcache_fast"]
    assert run.rise["signatures"] == 2
    assert run.rise["region_compiles"] == 0
    # A full pass calls each region of the model; a fast one leaves the deep ones out.
    plain = bench.run(changed(prompt, COMPILE))
    # On a GPU that is once for each signature, to capture it, and then they are replayed.
    full, fast, whole = (1, 1, 1) if plain.rise["captures"] else (FULL, FAST, 10)
    regions_of_full = plain.rise["region_calls"] / whole
    regions_of_fast = (run.rise["region_calls"] - full * regions_of_full) / fast
    assert regions_of_fast.is_integer()
    assert 0 < regions_of_fast < regions_of_full


def test_a_sampler_that_calls_the_model_twice_in_a_step(check: Check, prompt: PromptDict) -> None:
    check(with_sampling(prompt, sampler_name="heun"), passes=(7, 12))


def test_prompts_that_are_split_from_the_middle_on_keep_their_features(check: Check, prompt: PromptDict) -> None:
    # Steps 0 to 3 in one batch (two full), 4 to 9 in two calls each: step 4 goes on from the feature of step 3.
    check(prompt, passes=(2 + 2 * 2, 2 + 2 * 4), others=(node("ResoluteTestFreeMemory", from_step=4),))


def test_a_condition_that_comes_between_two_full_steps_runs_in_full_first(check: Check, prompt: PromptDict) -> None:
    # From step 5 on, in a batch of three: its first call, and with it the others', goes through everything.
    late = node("ConditioningSetTimestepRange", start=0.5, end=1.0)
    check(conditioned(prompt, late), passes=(FULL + 1, FAST - 1))


def test_a_picture_sampled_again_and_enlarged(check: Check, prompt: PromptDict) -> None:
    # Two samplers share one model: each run has features of its own.
    check(sampled_again(prompt), passes=[SHARED, (4, 8)])


def test_the_sdxl_family(check: Check, tiny_prompt: Any, seeds: Any, bench: Bench) -> None:
    def sdxl(width: int) -> PromptDict:
        whole = tiny_prompt(kind="sdxl", seed=next(seeds), width=width, height=104, steps=10)
        return without_decoder(whole)

    bench.run(changed(sdxl(128), COMPILE))  # the prompt that may compile
    check(sdxl(136), passes=SHARED)


class TestControlNet:
    @pytest.mark.grid(1)
    @pytest.mark.parametrize("window", [(0.0, 1.0), (0.2, 0.55)], ids=["always", "in the middle"])
    def test_its_residuals_reach_the_blocks_that_run(
        self, check: Check, prompt: PromptDict, window: tuple[float, float]
    ) -> None:
        start, end = window
        check(controlled(prompt, "net", start_percent=start, end_percent=end), passes=SHARED)

    def test_compiled_too(self, check: Check, prompt: PromptDict, bench: Bench) -> None:
        plain = controlled(prompt, "net", strength=0.8)
        ours = with_compiled_nets(plain, "inductor")
        bench.run(changed(ours, COMPILE))  # the prompt that may compile the convolutions of its own
        check(plain, passes=SHARED, compiled_prompt=ours, forwards_beside=10)


TILES = {"tile_size": 64, "swap_size": 2, "max_depth": 1, "scale_depth": False}
AFTER = {
    "FreeU": (node("FreeU", b1=1.4, b2=1.6, s1=0.7, s2=0.3), SHARED, ()),
    "HyperTile": (
        node("HyperTile", **TILES),
        SHARED,
        ("patched_block",),
    ),
    "PAG": (node("PerturbedAttentionGuidance", scale=3.0), SPLIT, ("patched_block",)),
    "SAG": (node("SelfAttentionGuidance", scale=0.8, blur_sigma=2.0), SPLIT, ("patched_block",)),
    "RescaleCFG": (node("RescaleCFG", multiplier=0.8), SHARED, ()),
}


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", AFTER)
def test_with_nodes_of_others(check: Check, prompt: PromptDict, name: str) -> None:
    if name == "HyperTile":  # it leaves a size alone that it cannot divide into tiles
        prompt["latent"]["inputs"].update(width=256, height=256)
    other, passes, bypasses = AFTER[name]
    # The plain loop knows nothing of output patches, nor of a second call for the same condition.
    reference = name in ("PAG", "RescaleCFG")
    run = check(prompt, passes=passes, others=(other,), reference=reference, bypasses=bypasses)
    assert_different(run, check.bench.run(changed(prompt, DEEPCACHE)))


def test_easycache_and_deepcache_compose_in_either_order(check: Check, prompt: PromptDict) -> None:
    easy = node("EasyCache", reuse_threshold=0.4, start_percent=0.1, end_percent=0.9, verbose=False)
    for order in ((DEEPCACHE, easy), (easy, DEEPCACHE)):
        alone, told = check.run(changed(prompt, *order))
        assert 2 < sum(told[0]) < 10, "EasyCache skipped nothing, or everything"
        for ours in ((COMPILE, *order), (*order, COMPILE)):
            compiled, told_compiled = check.run(changed(prompt, *ours))
            assert told_compiled == told
            assert_equal_latents(compiled, alone, LATENT_TOLERANCE)
            assert compiled.rise["region_compiles"] == 0
            assert compiled.forwards == sum(told[0])


class TestWhatHappensBefore:
    def test_a_cancelled_run_leaves_nothing_to_the_next_one(self, check: Check, prompt: PromptDict) -> None:
        for ours in ((DEEPCACHE,), (DEEPCACHE, COMPILE)):
            endless = changed(with_sampling(prompt, steps=5000, seed=3), *ours)
            before = len(check.server.log())
            check.bench.cancel_once(endless, lambda at=before: "5000 steps" in check.server.log()[at:])
            run, told = check.run(changed(prompt, *ours))
            assert told == [SHARED]
            assert_equal_latents(run, check.bench.run(changed(prompt, REFERENCE)), LATENT_TOLERANCE)
            prompt["sample"]["inputs"]["seed"] += 100_000

    @pytest.mark.grid(1)
    @pytest.mark.parametrize("step", [1, 5])
    def test_a_run_that_fails_in_the_middle_neither(self, check: Check, prompt: PromptDict, step: int) -> None:
        for ours in ((DEEPCACHE,), (COMPILE, DEEPCACHE)):
            with pytest.raises(PromptError, match=f"asked to fail at step {step}"):
                check.bench.client.run(changed(prompt, *ours, node("ResoluteTestFailingPatch", step=step)))
            run, told = check.run(changed(prompt, *ours))
            assert told == [SHARED]
            assert_equal_latents(run, check.bench.run(changed(prompt, REFERENCE)), LATENT_TOLERANCE)
            prompt["sample"]["inputs"]["seed"] += 100_000


def test_the_interval_has_a_range_of_its_own(check: Check, prompt: PromptDict) -> None:
    with pytest.raises(PromptError, match="interval"):
        check.bench.client.run(changed(prompt, node("ResoluteDeepCache", interval=1001, depth=2)))


@pytest.mark.long
@pytest.mark.old
def test_on_the_oldest_comfyui(make_server: Any, prompt: PromptDict, pytestconfig: pytest.Config) -> None:
    from scripts.setup import comfyui

    server = make_server(comfyui.OLDEST)
    bench = Bench(server.client)
    bench.run(changed(prompt, DEEPCACHE, COMPILE))
    prompt["sample"]["inputs"]["seed"] += 100_000
    Check(bench, server, pytestconfig.getoption("--on-cuda"))(controlled(prompt, "net"), passes=SHARED)
    server.stop()
