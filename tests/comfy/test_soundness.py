"""Every way in which a node can change a model takes effect, before and after Compile Model, and regions keep running.

``matrix/test_guidance.py`` has core's own nodes.
"""

from __future__ import annotations

from typing import Any

import pytest

from .fuzz.patches import INSIDE_BLOCKS, OUTSIDE_BLOCKS
from .rig import (
    Bench,
    assert_different,
    assert_ran_compiled,
    assert_same,
    compile_model,
    node,
    with_model,
    with_sampling,
)

STEPS = 4

pytestmark = pytest.mark.usefixtures("warm")
before_and_after = pytest.mark.parametrize("place", ["before", "after"])


def a_patch(kind: str) -> dict[str, Any]:
    return node("ResoluteTestPatch", kind=kind)


def placed(prompt: Any, other: dict[str, Any], place: str) -> Any:
    """The prompt with another node before or after Compile Model."""
    return with_model(prompt, *((other, compile_model()) if place == "before" else (compile_model(), other)))


@pytest.mark.grid(16)
@before_and_after
@pytest.mark.parametrize("kind", [*OUTSIDE_BLOCKS, *INSIDE_BLOCKS])
def test_a_patch_takes_effect_and_bypasses_only_the_blocks_that_it_is_inside_of(
    bench: Bench, prompt: Any, kind: str, place: str
) -> None:
    untouched, expected = bench.run(prompt), bench.run(with_model(prompt, a_patch(kind)))
    assert_different(expected, untouched)
    ours = bench.run(placed(prompt, a_patch(kind), place))
    assert_same(ours, expected)
    assert_ran_compiled(ours, STEPS, bypasses=("patched_block",) if kind in INSIDE_BLOCKS else ())
    assert ours.bypasses == ({"patched_block": STEPS} if kind in INSIDE_BLOCKS else {})


@before_and_after
def test_a_block_with_a_replaced_forward_runs_that_forward(bench: Bench, prompt: Any, seeds: Any, place: str) -> None:
    replaced = a_patch("replaced_forward")
    untouched, expected = bench.run(prompt), bench.run(with_model(prompt, replaced))
    assert_different(expected, untouched)
    ours = bench.run(placed(prompt, replaced, place))
    assert_same(ours, expected)
    assert_ran_compiled(ours, STEPS, bypasses=("replaced_forward",))
    prompt["sample"]["inputs"]["seed"] = next(seeds)
    again = bench.run(placed(prompt, replaced, place))
    assert again.bypasses == ours.bypasses, "the second prompt must count the bypass too"


def test_a_block_runs_compiled_again_after_its_forward_is_restored(bench: Bench, prompt: Any, seeds: Any) -> None:
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
    prompt["model"]["inputs"]["seed"] = 2  # a model that is new to this server
    replaced = a_patch("replaced_forward")
    expected, ours = bench.run(with_model(prompt, replaced)), bench.run(with_model(prompt, replaced, compile_model()))
    assert_same(ours, expected)
    prompt["sample"]["inputs"]["seed"] = next(seeds)
    expected, ours = bench.run(prompt), bench.run(with_model(prompt, compile_model()))
    assert_same(ours, expected)
    assert_ran_compiled(ours, STEPS)
    assert ours.rise["region_calls"] == whole.rise["region_calls"]


@before_and_after
def test_a_network_that_another_node_replaced_runs_eagerly(bench: Bench, prompt: Any, place: str) -> None:
    exchanged = a_patch("exchanged_network")
    untouched, expected = bench.run(prompt), bench.run(with_model(prompt, exchanged))
    assert_different(expected, untouched)
    assert_same(bench.run(placed(prompt, exchanged, place)), expected)
    prompt["sample"]["inputs"]["denoise"] = 0.999999  # the same steps, but not in ComfyUI's cache
    again = bench.run(prompt)
    assert_same(again, untouched)
    assert not again.touched_the_cache


def test_a_packs_change_of_the_model_itself_survives_an_unload(bench: Bench, prompt: Any) -> None:
    prompt["model"]["inputs"]["seed"] = 3  # its own model, because the change affects every clone
    untouched = bench.run(prompt)
    expected = bench.run(with_model(prompt, a_patch("changed_in_place")))
    assert_different(expected, untouched)
    assert_same(bench.run(with_model(prompt, a_patch("changed_in_place"), compile_model())), expected)
    bench.client.post("/free", {"unload_models": True})
    prompt["sample"]["inputs"]["denoise"] = 0.999999  # the same steps, but not in ComfyUI's cache
    assert_same(bench.run(prompt), expected)


def test_a_tie_between_two_timesteps_is_decided_as_in_comfyui(bench: Bench, prompt: Any, seeds: Any) -> None:
    """One of sgm_uniform's four sigmas lies between timesteps 499 and 500. Core computes sigmas on the model's current
    device, the CPU before loading and the GPU after, and the last bit decides between results that differ by a percent.
    """
    prompt["sample"]["inputs"]["scheduler"] = "sgm_uniform"
    numbers = [next(seeds), next(seeds)]

    def after_a_load(prompt: Any) -> list[Any]:
        bench.free()
        return [bench.run(with_sampling(prompt, seed=number)) for number in numbers]

    compiled = with_model(prompt, compile_model())
    for ours, expected in zip(after_a_load(compiled), after_a_load(prompt), strict=True):
        assert_same(ours, expected)
        assert_ran_compiled(ours, STEPS)
