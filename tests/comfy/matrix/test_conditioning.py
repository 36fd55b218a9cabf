"""Row 3: lengths of prompts, and conditioning that is cut, masked, joined or limited to a part of the run.

Core runs conditions of equal shape in one forward and others separately; each test says how many forwards that makes.
For an area, core adds a negative condition of the same area.
"""

from __future__ import annotations

from collections.abc import Callable
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


@pytest.mark.grid(4)
@pytest.mark.parametrize(
    ("positive", "negative", "forwards"),
    [
        (154, 154, SHARED), (231, 231, SHARED), (154, 77, SHARED), (77, 154, SHARED), (231, 77, SHARED),
        (231, 154, SHARED), (154, 231, SHARED), (4 * 77, 77, SHARED), (5 * 77, 77, SPLIT), (77, 5 * 77, SPLIT),
        (80, 77, SPLIT),
    ],
)  # fmt: skip
def test_prompts_of_any_length_share_a_forward_or_are_split_as_core_does(
    check: Check, prompt: PromptDict, positive: int, negative: int, forwards: int
) -> None:
    check_that_it_matters(check, lengths(prompt, positive, negative), prompt, forwards=forwards)


Change = Callable[[PromptDict], PromptDict]


def limited(kind: str, tokens: int = 77, forwards: int = STEPS, **inputs: Any) -> tuple[Change, Change, int]:
    """A second condition that a node limits, beside the same one without a limit."""
    limit = node(kind, **inputs)
    return (
        lambda prompt: combined(rectangle(prompt), limit, tokens),
        lambda prompt: combined(prompt, ALWAYS, tokens),
        forwards,
    )


def joined(kind: str, tokens: int, forwards: int = SHARED, **inputs: Any) -> tuple[Change, Change, int]:
    """The positive condition joined with another one by a node."""
    names = (
        ("conditioning_1", "conditioning_2") if kind.endswith("Combine") else ("conditioning_to", "conditioning_from")
    )
    links = dict(zip(names, (["positive", 0], ["other", 0]), strict=True))
    both = node(kind, **links, **inputs)
    return (
        lambda prompt: with_positive(prompt, ["both", 0], other=conditioning(21, tokens), both=both),
        lambda prompt: prompt,
        forwards,
    )


def parts(first: dict[str, Any], second: dict[str, Any], tokens: int, forwards: int) -> tuple[Change, Change, int]:
    """Two conditions, each limited by a node."""
    nodes = {
        "other": conditioning(21, tokens),
        "first": {**first, "inputs": {**first["inputs"], "conditioning": ["positive", 0]}},
        "second": {**second, "inputs": {**second["inputs"], "conditioning": ["other", 0]}},
        "both": node("ConditioningCombine", conditioning_1=["first", 0], conditioning_2=["second", 0]),
    }
    return lambda prompt: with_positive(prompt, ["both", 0], **nodes), lambda prompt: prompt, forwards


def without_guidance(tokens: int) -> tuple[Change, Change, int]:
    return lambda prompt: with_sampling(lengths(prompt, tokens, 77), cfg=1.0), lambda prompt: prompt, STEPS


def alone(prompt: PromptDict) -> PromptDict:
    half = {**FIRST_HALF, "inputs": {**FIRST_HALF["inputs"], "conditioning": ["positive", 0]}}
    return with_positive(prompt, ["half", 0], half=half)


RANGE, MASK = "ConditioningSetTimestepRange", "ConditioningSetMask"
FIRST_HALF, SECOND_HALF = node(RANGE, start=0.0, end=0.5), node(RANGE, start=0.5, end=1.0)
LEFT, RIGHT = (node("ConditioningSetArea", **{**LEFT_HALF, **part}) for part in ({}, {"width": 72, "x": 64}))
MASKED = {"mask": ["mask", 0], "strength": 1.5}
# What changes, what it is compared with, and the forwards: an area runs as one of its own.
CHANGES: dict[str, tuple[Change, Change, int]] = {
    **{f"no negative one, {tokens} tokens": without_guidance(tokens) for tokens in LENGTHS},
    **{f"an area in pixels, {n}": limited("ConditioningSetArea", n, 2 * STEPS, **LEFT_HALF) for n in (77, 154)},
    **{
        f"an area in percent, {n}": limited("ConditioningSetAreaPercentage", n, 2 * STEPS, **LOWER_RIGHT)
        for n in (77, 154)
    },
    # Left, right, and the negative prompt for the whole image.
    "two areas and nothing for the whole picture": parts(LEFT, RIGHT, 77, 3 * STEPS),
    # By default, three conditions share a forward with a batch of 3.
    "a mask that weighs": limited(MASK, **MASKED, set_cond_area="default"),
    "a mask that cuts out its bounds": limited(MASK, forwards=2 * STEPS, **MASKED, set_cond_area="mask bounds"),
    "one that ends": limited(RANGE, start=0.0, end=0.5),  # a batch of 3 until it ends, then of 2
    "one that starts": limited(RANGE, 154, start=0.5, end=1.0),
    # Two steps with one forward for 77 and 77 tokens, then two steps with one forward for each of 385 and 77.
    "one that replaces another of other length": parts(FIRST_HALF, SECOND_HALF, 5 * 77, 2 + 2 * 2),
    "the only positive one ends": (alone, lambda prompt: prompt, STEPS),
    **{f"a longer text, {n}": joined("ConditioningConcat", n) for n in LENGTHS},
    **{f"a larger batch, {n}": joined("ConditioningCombine", n) for n in (77, 154)},
    "lengths of no batch": joined("ConditioningCombine", 5 * 77, SPLIT),
    **{f"the average, {n}": joined("ConditioningAverage", n, conditioning_to_strength=0.6) for n in (77, 154)},
}


@pytest.mark.parametrize("name", CHANGES)
def test_conditions_that_are_cut_masked_joined_or_limited(check: Check, prompt: PromptDict, name: str) -> None:
    change, base, forwards = CHANGES[name]
    check_that_it_matters(check, change(prompt), base(prompt), forwards=forwards)


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
