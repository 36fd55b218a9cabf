"""Row 3: lengths of prompts, and conditioning that is cut, masked, joined or limited to a part of the run.

Core runs conditions of equal shape in one forward and others separately; each test says how many forwards that makes.
For an area, core adds a negative condition of the same area.
"""

from __future__ import annotations

from typing import Any

import pytest

from ..rig import PromptDict, assert_different, node, with_sampling, without_decoder
from .kit import Check

STEPS = 4
LENGTHS = (77, 154, 231)
# Core repeats texts up to four times to a common length, so that they share a forward; beyond that it splits them.
SHARED, SPLIT = STEPS, 2 * STEPS

FULL = {"width": 768, "pooled_width": 0, "batch": 1}
LEFT_HALF = {"width": 64, "height": 104, "x": 0, "y": 0, "strength": 1.2}
LOWER_RIGHT = {"width": 0.5, "height": 0.6, "x": 0.4, "y": 0.3, "strength": 1.0}
# A range that covers everything, to compare the other nodes with.
ALWAYS = node("ConditioningSetTimestepRange", start=0.0, end=1.0)


def conditioning(seed: int, tokens: int = 77) -> dict[str, Any]:
    """Random embeddings for the tiny SD1.5 model."""
    return node("ResoluteTestConditioning", seed=seed, tokens=tokens, **FULL)


def with_positive(prompt: PromptDict, positive: list[Any], **nodes: dict[str, Any]) -> PromptDict:
    """The prompt with more nodes, and `positive` as the positive conditioning."""
    return with_sampling({**prompt, **nodes}, positive=positive)


def combined(prompt: PromptDict, changed: dict[str, Any], tokens: int = 77) -> PromptDict:
    """The prompt with its positive conditioning combined with another one, which the node `changed` modifies."""
    changed = {**changed, "inputs": {**changed["inputs"], "conditioning": ["other", 0]}}
    both = node("ConditioningCombine", conditioning_1=["positive", 0], conditioning_2=["changed", 0])
    return with_positive(prompt, ["both", 0], other=conditioning(21, tokens), changed=changed, both=both)


def rectangle(prompt: PromptDict) -> PromptDict:
    """The prompt with a mask as ["mask", 0]: 136x104, a rectangle of 64x72 at (40, 16)."""
    return {
        **prompt,
        "nothing": node("SolidMask", value=0.0, width=136, height=104),
        "block": node("SolidMask", value=1.0, width=64, height=72),
        "mask": node("MaskComposite", destination=["nothing", 0], source=["block", 0], x=40, y=16, operation="add"),
    }


def check_that_it_matters(check: Check, changed: PromptDict, untouched: PromptDict, *, forwards: int) -> None:
    """Check that the changed prompt gives another image than the untouched one, and that ours equals ComfyUI's."""
    assert_different(check.bench.run(changed), check.bench.run(untouched))
    check(changed, forwards=forwards)


def lengths(prompt: PromptDict, positive: int, negative: int) -> PromptDict:
    """The prompt with other numbers of tokens."""
    return {**prompt, "positive": conditioning(11, positive), "negative": conditioning(12, negative)}


@pytest.mark.parametrize("tokens", LENGTHS)
def test_prompts_of_any_length_compile_nothing(check: Check, prompt: PromptDict, tokens: int) -> None:
    check(lengths(prompt, tokens, tokens), forwards=SHARED)


@pytest.mark.grid(4)
@pytest.mark.parametrize(
    ("positive", "negative", "forwards"),
    [
        (154, 77, SHARED),
        (77, 154, SHARED),
        (231, 77, SHARED),
        (231, 154, SHARED),
        (154, 231, SHARED),
        (4 * 77, 77, SHARED),
        (5 * 77, 77, SPLIT),
        (77, 5 * 77, SPLIT),
        (80, 77, SPLIT),
    ],
)
def test_prompts_of_unequal_length_share_a_forward_or_are_split_as_core_does(
    check: Check, prompt: PromptDict, positive: int, negative: int, forwards: int
) -> None:
    check_that_it_matters(check, lengths(prompt, positive, negative), prompt, forwards=forwards)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_without_guidance_the_negative_prompt_is_left_out(check: Check, prompt: PromptDict, tokens: int) -> None:
    check_that_it_matters(check, with_sampling(lengths(prompt, tokens, 77), cfg=1.0), prompt, forwards=STEPS)


@pytest.mark.grid(2)
@pytest.mark.parametrize("tokens", [77, 154])
@pytest.mark.parametrize(
    "area",
    [node("ConditioningSetArea", **LEFT_HALF), node("ConditioningSetAreaPercentage", **LOWER_RIGHT)],
    ids=["pixels", "percentage"],
)
def test_an_area_runs_as_a_forward_of_its_own(
    check: Check, prompt: PromptDict, area: dict[str, Any], tokens: int
) -> None:
    check_that_it_matters(check, combined(prompt, area, tokens), combined(prompt, ALWAYS, tokens), forwards=2 * STEPS)


def test_two_areas_and_no_conditioning_for_the_whole_picture(check: Check, prompt: PromptDict) -> None:
    # Three forwards per step: left, right, and the negative prompt for the whole image.
    changed = with_positive(
        prompt,
        ["both", 0],
        other=conditioning(21),
        left=node("ConditioningSetArea", conditioning=["positive", 0], **LEFT_HALF),
        right=node("ConditioningSetArea", conditioning=["other", 0], **{**LEFT_HALF, "width": 72, "x": 64}),
        both=node("ConditioningCombine", conditioning_1=["left", 0], conditioning_2=["right", 0]),
    )
    check_that_it_matters(check, changed, prompt, forwards=3 * STEPS)


@pytest.mark.parametrize(
    ("where", "forwards"), [("default", STEPS), ("mask bounds", 2 * STEPS)], ids=["whole", "bounds"]
)
def test_a_mask_weighs_the_result_or_cuts_out_its_bounds(
    check: Check, prompt: PromptDict, where: str, forwards: int
) -> None:
    # By default, three conditions share a forward with a batch of 3.
    masked = node("ConditioningSetMask", mask=["mask", 0], strength=1.5, set_cond_area=where)
    check_that_it_matters(check, combined(rectangle(prompt), masked), combined(prompt, ALWAYS), forwards=forwards)


def test_a_condition_that_ends_in_the_middle_of_the_run(check: Check, prompt: PromptDict) -> None:
    # A batch of 3 until the condition ends, then of 2.
    half = node("ConditioningSetTimestepRange", start=0.0, end=0.5)
    check_that_it_matters(check, combined(prompt, half), combined(prompt, ALWAYS), forwards=STEPS)


def test_a_condition_that_starts_in_the_middle_of_the_run(check: Check, prompt: PromptDict) -> None:
    late = node("ConditioningSetTimestepRange", start=0.5, end=1.0)
    check_that_it_matters(check, combined(prompt, late, 154), combined(prompt, ALWAYS, 154), forwards=STEPS)


def test_one_condition_replaces_another_of_other_length(check: Check, prompt: PromptDict) -> None:
    changed = with_positive(
        prompt,
        ["both", 0],
        other=conditioning(21, 5 * 77),
        first=node("ConditioningSetTimestepRange", conditioning=["positive", 0], start=0.0, end=0.5),
        second=node("ConditioningSetTimestepRange", conditioning=["other", 0], start=0.5, end=1.0),
        both=node("ConditioningCombine", conditioning_1=["first", 0], conditioning_2=["second", 0]),
    )
    # Two steps with one forward for 77 and 77 tokens, then two steps with one forward for each of 385 and 77.
    check_that_it_matters(check, changed, prompt, forwards=2 + 2 * 2)


def test_the_only_positive_condition_ends_and_the_negative_one_runs_alone(check: Check, prompt: PromptDict) -> None:
    half = node("ConditioningSetTimestepRange", conditioning=["positive", 0], start=0.0, end=0.5)
    check_that_it_matters(check, with_positive(prompt, ["half", 0], half=half), prompt, forwards=STEPS)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_joined_conditions_are_one_longer_text(check: Check, prompt: PromptDict, tokens: int) -> None:
    joined = node("ConditioningConcat", conditioning_to=["positive", 0], conditioning_from=["other", 0])
    changed = with_positive(prompt, ["joined", 0], other=conditioning(21, tokens), joined=joined)
    check_that_it_matters(check, changed, prompt, forwards=SHARED)


@pytest.mark.parametrize("tokens", [77, 154, 5 * 77])
def test_combined_conditions_are_a_larger_batch_where_their_lengths_allow(
    check: Check, prompt: PromptDict, tokens: int
) -> None:
    both = node("ConditioningCombine", conditioning_1=["positive", 0], conditioning_2=["other", 0])
    changed = with_positive(prompt, ["both", 0], other=conditioning(21, tokens), both=both)
    check_that_it_matters(check, changed, prompt, forwards=SPLIT if tokens == 5 * 77 else SHARED)


@pytest.mark.parametrize("tokens", [77, 154])
def test_the_average_of_two_conditions_compiles_nothing(check: Check, prompt: PromptDict, tokens: int) -> None:
    average = node(
        "ConditioningAverage",
        conditioning_to=["positive", 0],
        conditioning_from=["other", 0],
        conditioning_to_strength=0.6,
    )
    changed = with_positive(prompt, ["average", 0], other=conditioning(21, tokens), average=average)
    check_that_it_matters(check, changed, prompt, forwards=SHARED)


@pytest.mark.usefixtures("warm_sdxl")
def test_areas_and_lengths_of_the_sdxl_family_compile_nothing(check: Check, tiny_prompt: Any, seeds: Any) -> None:
    # Each condition has pooled embeddings and sizes, which must be batched with it.
    def sdxl(width: int, tokens: int) -> PromptDict:
        prompt = tiny_prompt(kind="sdxl", seed=next(seeds), width=width, height=104, tokens=tokens, steps=STEPS)
        return without_decoder(prompt)

    untouched = sdxl(136, 154)
    other = node("ResoluteTestConditioning", seed=21, tokens=77, **{**FULL, "width": 2048, "pooled_width": 1280})
    both = node("ConditioningCombine", conditioning_1=["positive", 0], conditioning_2=["other", 0])
    check_that_it_matters(
        check, with_positive(untouched, ["both", 0], other=other, both=both), untouched, forwards=STEPS
    )
    area = node("ConditioningSetArea", conditioning=["other", 0], **LEFT_HALF)
    both = node("ConditioningCombine", conditioning_1=["positive", 0], conditioning_2=["area", 0])
    changed = with_positive(untouched, ["both", 0], other=other, area=area, both=both)
    check_that_it_matters(check, changed, untouched, forwards=2 * STEPS)
