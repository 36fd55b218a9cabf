"""Row 2: batches, and how core distributes the conditions of a step over forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scripts.errors import PromptError

from ..rig import PromptDict, node, with_model, without_decoder
from .kit import Check

STEPS = 2
MERGE, SPLIT = "always merge", "always split"
FORWARDS = {MERGE: STEPS, SPLIT: 2 * STEPS}


# The model's batch is twice the latent's; from 16 on, convolutions on the CPU choose another algorithm.
@pytest.mark.grid(4)
@pytest.mark.parametrize("batch", [5, 1, 8, 3, 2, 7, 4, 6, 12])
def test_a_batch_of_any_size_compiles_nothing(check: Check, tiny_prompt: Any, seed: int, batch: int) -> None:
    run = check(tiny_prompt(seed=seed, width=88, height=72, batch=batch, steps=STEPS), forwards=STEPS + 1)
    assert len(run.images) == batch


def with_area(prompt: PromptDict) -> None:
    area = {"width": 72, "height": 64, "x": 64, "y": 8, "strength": 1.0}
    prompt["area"] = node("ConditioningSetArea", conditioning=["positive", 0], **area)
    prompt["both"] = node("ConditioningCombine", conditioning_1=["positive", 0], conditioning_2=["area", 0])
    prompt["sample"]["inputs"]["positive"] = ["both", 0]


def with_repeats(prompt: PromptDict) -> None:
    prompt["repeated"] = node("RepeatLatentBatch", samples=["latent", 0], amount=3)
    prompt["sample"]["inputs"]["latent_image"] = ["repeated", 0]


def with_unequal_prompts(prompt: PromptDict) -> None:
    prompt["positive"]["inputs"]["tokens"] = 5 * 77


# Settings, what else changes, the forwards, and the batch of the result.
BATCHES: dict[str, tuple[dict[str, Any], Callable[[PromptDict], object], int, int]] = {
    **{f"{n} without guidance": ({"batch": n, "cfg": 1.0}, lambda _: None, STEPS, n) for n in (1, 3, 8)},
    **{f"{n} with a longer prompt": ({"batch": n, "tokens": 154}, lambda _: None, STEPS, n) for n in (2, 5)},
    "split by unequal prompts": ({"batch": 3}, with_unequal_prompts, 2 * STEPS, 3),
    "an area": ({"batch": 3, "width": 136}, with_area, 2 * STEPS, 3),
    "a repeated latent": ({"batch": 2}, with_repeats, STEPS, 6),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_compiles_nothing(check: Check, tiny_prompt: Any, seed: int, name: str) -> None:
    settings, change, forwards, batch = BATCHES[name]
    prompt = without_decoder(tiny_prompt(**{"seed": seed, "width": 72, "height": 88, "steps": STEPS, **settings}))
    change(prompt)
    assert check(prompt, forwards=forwards).latents[0].shape[0] == batch


def test_a_part_of_a_batch_is_sampled_again_as_its_own_image(check: Check, tiny_prompt: Any, seed: int) -> None:
    prompt = without_decoder(tiny_prompt(seed=seed, width=88, height=104, batch=4, steps=STEPS))
    first = node("ResoluteTestSaveLatent", samples=["sample", 0], filename_prefix="whole")
    chosen = node("LatentFromBatch", samples=["sample", 0], batch_index=1, length=3)
    again = {**prompt["sample"]["inputs"], "latent_image": ["chosen", 0], "denoise": 0.5}
    prompt |= {"first": first, "chosen": chosen, "again": node("KSampler", **again)}
    prompt["samples"]["inputs"]["samples"] = ["again", 0]
    compiled = {"compiled": node("ResoluteCompileModel", model=["model", 0], backend=check.backend)}
    ours = {**prompt, **compiled}
    for name in ("sample", "again"):
        ours[name] = {**prompt[name], "inputs": {**prompt[name]["inputs"], "model": ["compiled", 0]}}
    run = check(prompt, ours, forwards=2 * STEPS)
    assert sorted(latent.shape[0] for latent in run.latents) == [3, 4]


def batching(backend: str, policy: str) -> dict[str, Any]:
    """A Compile Model node without its model input."""
    return node("ResoluteCompileModel", backend=backend, batching=policy)


def policy_prompt(tiny_prompt: Any, seed: int, batch: int = 1) -> PromptDict:
    """A prompt with a new model, so that each of its signatures is new and reported as an event."""
    prompt = without_decoder(tiny_prompt(seed=seed, width=136, height=88, batch=batch, steps=STEPS))
    prompt["model"]["inputs"]["seed"] = seed
    return prompt


def signatures(check: Check, prompt: PromptDict) -> list[str]:
    """The new latent shapes of a prompt, as "2x4x11x17"."""
    _, texts = check.bench.signatures(prompt)
    return [text.partition(":")[0].rpartition(" ")[2] for text in texts]


@pytest.mark.parametrize("batch", [1, 3])
def test_merged_conditions_are_one_forward_and_split_ones_are_two_of_half_the_batch(
    check: Check, tiny_prompt: Any, seed: int, batch: int
) -> None:
    prompt = policy_prompt(tiny_prompt, seed, batch)
    for policy, size in [(MERGE, 2 * batch), (SPLIT, batch)]:
        assert set(signatures(check, with_model(prompt, batching(check.backend, policy)))) == {f"{size}x4x11x17"}
    for policy, forwards in [("auto", STEPS), *FORWARDS.items()]:
        prompt["sample"]["inputs"]["seed"] += 1_000_000
        check(prompt, with_model(prompt, batching(check.backend, policy)), forwards=forwards)


def test_changes_between_merge_and_split_compile_nothing(check: Check, tiny_prompt: Any, seeds: Any) -> None:
    for policy in (SPLIT, MERGE, SPLIT, "auto", SPLIT, MERGE):
        prompt = without_decoder(tiny_prompt(seed=next(seeds), width=136, height=104, batch=2, steps=STEPS))
        ours = with_model(prompt, batching(check.backend, policy))
        check(prompt, ours, forwards=FORWARDS.get(policy, STEPS))


@pytest.mark.parametrize(("policy", "forwards"), [("auto", 2 * STEPS), (MERGE, 2 * STEPS), (SPLIT, 5 * STEPS)])
def test_each_condition_and_each_area_is_split_from_the_others(
    check: Check, tiny_prompt: Any, seed: int, policy: str, forwards: int
) -> None:
    # Two positive and one negative condition of one shape, and an area, for which core adds a negative one.
    prompt = without_decoder(tiny_prompt(seed=seed, width=136, height=88, steps=STEPS))
    prompt["other"] = node("ResoluteTestConditioning", seed=21, tokens=154, width=768, pooled_width=0, batch=1)
    prompt["area"] = node(
        "ConditioningSetArea", conditioning=["other", 0], width=64, height=64, x=8, y=16, strength=1.0
    )
    prompt["two"] = node("ConditioningCombine", conditioning_1=["positive", 0], conditioning_2=["other", 0])
    prompt["three"] = node("ConditioningCombine", conditioning_1=["two", 0], conditioning_2=["area", 0])
    prompt["sample"]["inputs"]["positive"] = ["three", 0]
    check(prompt, with_model(prompt, batching(check.backend, policy)), forwards=forwards)


@pytest.mark.grid(3)
@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize(
    ("policy", "forwards"), [("auto", 2 + 2 * 2), (MERGE, 4), (SPLIT, 2 * 4)], ids=["auto", "merge", "split"]
)
def test_low_memory_in_the_middle_of_a_run_splits_only_what_core_decides(
    check: Check, tiny_prompt: Any, seed: int, policy: str, forwards: int, place: str
) -> None:
    prompt = without_decoder(tiny_prompt(seed=seed, width=104, height=88, steps=4))
    short, ours = node("ResoluteTestFreeMemory", from_step=2), batching(check.backend, policy)
    order = (short, ours) if place == "before" else (ours, short)
    check(with_model(prompt, short), with_model(prompt, *order), forwards=forwards)


@pytest.mark.parametrize(("first", "last"), [(SPLIT, MERGE), (MERGE, SPLIT), (SPLIT, "auto")])
def test_the_last_of_two_compile_nodes_decides(
    check: Check, tiny_prompt: Any, seed: int, first: str, last: str
) -> None:
    prompt = without_decoder(tiny_prompt(seed=seed, width=104, height=136, steps=STEPS))
    ours = with_model(prompt, batching(check.backend, first), batching(check.backend, last))
    check(prompt, ours, forwards=FORWARDS.get(last, STEPS))


def test_a_split_model_leaves_its_input_unchanged(check: Check, tiny_prompt: Any, seed: int) -> None:
    # Two samplers in one prompt: one on the split model, one on the original, whose forwards "eager" counts.
    prompt = without_decoder(tiny_prompt(seed=seed, width=88, height=104, batch=2, steps=STEPS))
    prompt["again"] = node("KSampler", **{**prompt["sample"]["inputs"], "latent_image": ["sample", 0], "denoise": 0.5})
    prompt["samples"]["inputs"]["samples"] = ["again", 0]
    ours = with_model(prompt, batching(check.backend, SPLIT))
    ours = with_model(ours, node("ResoluteCompileModel", backend="eager"), sampler="again")
    check(prompt, ours, forwards=FORWARDS[SPLIT], eager_calls=STEPS)


def test_a_failed_split_run_leaves_nothing_behind(check: Check, tiny_prompt: Any, seeds: Any) -> None:
    failing = without_decoder(tiny_prompt(seed=next(seeds), width=88, height=104, steps=STEPS))
    fails = node("ResoluteTestFailingPatch", step=1)
    with pytest.raises(PromptError, match="asked to fail at step 1"):
        check.bench.run(with_model(failing, fails, batching(check.backend, SPLIT)))
    prompt = without_decoder(tiny_prompt(seed=next(seeds), width=88, height=104, steps=STEPS))
    check(prompt, with_model(prompt, node("ResoluteCompileModel", backend=check.backend)), forwards=STEPS)
