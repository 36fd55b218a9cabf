"""What other nodes do to a model takes effect, in either order, and the regions keep running."""

from __future__ import annotations

from typing import Any

import pytest

from .rig import Bench, assert_different, assert_ran_compiled, assert_same, compile_model, node, with_model

STEPS = 4
FREE_U = node("FreeU_V2", b1=1.5, b2=1.6, s1=0.7, s2=0.3)
RESCALE = node("RescaleCFG", multiplier=0.8)
EASY_CACHE = node("EasyCache", reuse_threshold=0.5, start_percent=0.1, end_percent=0.9, verbose=False)
LAZY_CACHE = node("LazyCache", reuse_threshold=0.5, start_percent=0.1, end_percent=0.9, verbose=False)
PAG = node("PerturbedAttentionGuidance", scale=3.0)
HYPER_TILE = node("HyperTile", tile_size=64, swap_size=2, max_depth=1, scale_depth=False)

INSIDE_BLOCKS = [
    "attn1_patch",
    "attn2_patch",
    "attn1_output_patch",
    "attn2_output_patch",
    "middle_patch",
    "attn1_replace",
    "attn2_replace",
    "attention_override",
]
OUTSIDE_BLOCKS = [
    "input_block_patch",
    "input_block_patch_after_skip",
    "output_block_patch",
    "middle_block_after_patch",
    "emb_patch",
    "forward_timestep_embed_patch",
    "apply_model_wrapper",
    "diffusion_model_wrapper",
]

pytestmark = pytest.mark.usefixtures("warm")
before_and_after = pytest.mark.parametrize("place", ["before", "after"])


def a_patch(kind: str) -> dict[str, Any]:
    return node("ResoluteTestPatch", kind=kind)


def placed(prompt: Any, other: dict[str, Any], place: str) -> Any:
    """The prompt with another node before or after Compile Model."""
    return with_model(prompt, *((other, compile_model()) if place == "before" else (compile_model(), other)))


def latents_only(prompt: Any) -> Any:
    """Without the decoder: these tests are about the model."""
    return {name: part for name, part in prompt.items() if name not in ("vae", "decode", "image")}


@pytest.fixture
def prompt(tiny_prompt: Any, seed: int) -> Any:
    """Four steps of the tiny model at an odd size, a latent of 17x13."""
    return latents_only(tiny_prompt(seed=seed, width=136, height=104, steps=STEPS))


@before_and_after
@pytest.mark.parametrize("other", [FREE_U, RESCALE], ids=lambda other: other["class_type"])
def test_a_core_node_takes_effect_and_the_regions_keep_running(
    bench: Bench, prompt: Any, other: dict[str, Any], place: str
) -> None:
    untouched, expected = bench.run(prompt), bench.run(with_model(prompt, other))
    assert_different(expected, untouched)
    ours = bench.run(placed(prompt, other, place))
    assert_same(ours, expected)
    assert_ran_compiled(ours, STEPS)


@before_and_after
@pytest.mark.parametrize("other", [EASY_CACHE, LAZY_CACHE], ids=lambda other: other["class_type"])
def test_a_step_cache_skips_the_same_steps(
    bench: Bench, tiny_prompt: Any, seed: int, other: dict[str, Any], place: str
) -> None:
    steps = 12
    prompt = latents_only(tiny_prompt(seed=seed, steps=steps))
    untouched, expected = bench.run(prompt), bench.run(with_model(prompt, other))
    assert_different(expected, untouched)
    ours = bench.run(placed(prompt, other, place))
    assert_same(ours, expected)
    assert 0 < ours.rise["graph_calls"] < steps, "no step was skipped, or all of them"
    assert_ran_compiled(ours, ours.rise["graph_calls"])
    eager = bench.run(with_model(prompt, other, compile_model("eager")))
    assert eager.rise["eager_calls"] == ours.rise["graph_calls"]


def test_free_u_added_after_a_compiled_prompt_takes_effect(bench: Bench, prompt: Any) -> None:
    # Core's own compile node reuses here the graph that was compiled without FreeU.
    without = bench.run(prompt)
    compiled_first = with_model(prompt, compile_model())
    assert_same(bench.run(compiled_first), without)
    expected = bench.run(with_model(prompt, FREE_U))
    added = bench.run(with_model(prompt, compile_model(), FREE_U))
    assert_different(expected, without)
    assert_same(added, expected)
    assert_ran_compiled(added, STEPS)


def test_free_u_taken_away_again_leaves_nothing_behind(bench: Bench, prompt: Any, seeds: Any) -> None:
    bench.run(with_model(prompt, compile_model(), FREE_U))
    prompt["sample"]["inputs"]["seed"] = next(seeds)
    expected, ours = bench.run(prompt), bench.run(with_model(prompt, compile_model()))
    assert_same(ours, expected)
    assert_ran_compiled(ours, STEPS)


@before_and_after
@pytest.mark.parametrize("kind", OUTSIDE_BLOCKS)
def test_a_patch_outside_the_blocks_takes_effect_without_a_bypass(
    bench: Bench, prompt: Any, kind: str, place: str
) -> None:
    untouched, expected = bench.run(prompt), bench.run(with_model(prompt, a_patch(kind)))
    assert_different(expected, untouched)
    ours = bench.run(placed(prompt, a_patch(kind), place))
    assert_same(ours, expected)
    assert_ran_compiled(ours, STEPS)


@before_and_after
@pytest.mark.parametrize("kind", INSIDE_BLOCKS)
def test_a_patch_inside_the_blocks_takes_effect_and_costs_those_blocks_only(
    bench: Bench, prompt: Any, kind: str, place: str
) -> None:
    untouched, expected = bench.run(prompt), bench.run(with_model(prompt, a_patch(kind)))
    assert_different(expected, untouched)
    ours = bench.run(placed(prompt, a_patch(kind), place))
    assert_same(ours, expected)
    assert_ran_compiled(ours, STEPS, bypasses=("patched_block",))
    assert ours.bypasses == {"patched_block": STEPS}


@before_and_after
@pytest.mark.parametrize("other", [PAG, HYPER_TILE], ids=lambda other: other["class_type"])
def test_a_core_node_that_patches_attention_costs_those_blocks_only(
    bench: Bench, tiny_prompt: Any, seed: int, other: dict[str, Any], place: str
) -> None:
    # 256x256: HyperTile leaves a size alone that it cannot divide into tiles.
    prompt = latents_only(tiny_prompt(seed=seed, steps=STEPS))
    untouched, expected = bench.run(prompt), bench.run(with_model(prompt, other))
    assert_different(expected, untouched)
    ours = bench.run(placed(prompt, other, place))
    assert_same(ours, expected)
    # Perturbed attention is a second, patched forward in every step.
    forwards = 2 * STEPS if other is PAG else STEPS
    assert_ran_compiled(ours, forwards, bypasses=("patched_block",))
    assert ours.bypasses == {"patched_block": STEPS}


@before_and_after
def test_a_block_whose_forward_another_node_replaced_runs_as_replaced(
    bench: Bench, prompt: Any, seeds: Any, place: str
) -> None:
    replaced = a_patch("replaced_forward")
    untouched, expected = bench.run(prompt), bench.run(with_model(prompt, replaced))
    assert_different(expected, untouched)
    ours = bench.run(placed(prompt, replaced, place))
    assert_same(ours, expected)
    assert_ran_compiled(ours, STEPS, bypasses=("replaced_forward",))
    prompt["sample"]["inputs"]["seed"] = next(seeds)
    again = bench.run(placed(prompt, replaced, place))
    assert again.bypasses == ours.bypasses, "a bypass is counted in the first prompt only"


def test_a_block_runs_compiled_again_once_its_forward_is_its_own(bench: Bench, prompt: Any, seeds: Any) -> None:
    whole = bench.run(with_model(prompt, compile_model()))
    bench.run(with_model(prompt, a_patch("replaced_forward"), compile_model()))
    prompt["sample"]["inputs"]["seed"] = next(seeds)
    expected, ours = bench.run(prompt), bench.run(with_model(prompt, compile_model()))
    assert_same(ours, expected)
    assert_ran_compiled(ours, STEPS)
    assert ours.rise["region_calls"] == whole.rise["region_calls"]


def test_a_model_first_seen_with_a_replaced_forward_runs_compiled_without_it(
    bench: Bench, prompt: Any, seeds: Any
) -> None:
    whole = bench.run(with_model(prompt, compile_model()))
    prompt["model"]["inputs"]["seed"] = 2  # a model that this server has not seen yet
    replaced = a_patch("replaced_forward")
    expected, ours = bench.run(with_model(prompt, replaced)), bench.run(with_model(prompt, replaced, compile_model()))
    assert_same(ours, expected)
    prompt["sample"]["inputs"]["seed"] = next(seeds)
    expected, ours = bench.run(prompt), bench.run(with_model(prompt, compile_model()))
    assert_same(ours, expected)
    assert_ran_compiled(ours, STEPS)
    assert ours.rise["region_calls"] == whole.rise["region_calls"]


@before_and_after
def test_merged_weights_take_effect_and_compile_nothing(bench: Bench, prompt: Any, place: str) -> None:
    # Merging patches weights as a LoRA does: at load, into new parameters.
    prompt["other-model"] = node("ResoluteTestTinyModel", seed=3, kind="sd")
    merge = node("ModelMergeSimple", model1=prompt["sample"]["inputs"]["model"], model2=["other-model", 0], ratio=0.6)

    def merged(own: bool) -> Any:
        inputs = dict(merge["inputs"])
        changed = {**prompt, "merge": {**merge, "inputs": inputs}, "sample": {**prompt["sample"]}}
        changed["sample"]["inputs"] = {**prompt["sample"]["inputs"], "model": ["merge", 0]}
        if own and place == "before":
            return with_model(changed, compile_model())
        if own:
            changed["compiled"] = node("ResoluteCompileModel", backend="inductor", model=inputs["model1"])
            inputs["model1"] = ["compiled", 0]
        return changed

    untouched, expected = bench.run(prompt), bench.run(merged(own=False))
    assert_different(expected, untouched)
    ours = bench.run(merged(own=True))
    assert_same(ours, expected)
    assert_ran_compiled(ours, STEPS)
    again = bench.run(with_model(prompt, compile_model()))
    assert_same(again, untouched)
    assert_ran_compiled(again, STEPS)
