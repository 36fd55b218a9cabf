"""What another pack changes for everybody in one prompt takes effect in that prompt, and in no other one."""

from __future__ import annotations

from typing import Any

import pytest

from .rig import Bench, assert_different, assert_same, compile_model, node, with_model, with_sampling

STEPS = 4
EXCHANGED = [
    "exchanged attention",
    "exchanged torch attention",
    "exchanged attention of core's",
    "exchanged activation",
    "exchanged gelu",
    "exchanged embedding",
]

pytestmark = pytest.mark.usefixtures("warm")


def changed(kind: str) -> Any:
    return node("ResoluteTestGlobalState", kind=kind)


def again(prompt: Any, number: int) -> Any:
    """The same steps, and another prompt: ComfyUI does not sample one that it has just sampled."""
    return with_sampling(prompt, denoise=1.0 - number * 1e-7)


INSIDE = ["number of numpy", "number of a pack", "class of a layer", "other defaults"]  # no object is exchanged


@pytest.mark.parametrize("kind", ["autocast", *EXCHANGED, *INSIDE])
def test_it_takes_effect_in_its_own_prompt_only(bench: Bench, prompt: Any, kind: str) -> None:
    plain, expected = bench.run(prompt), bench.run(with_model(prompt, changed(kind)))
    assert_different(expected, plain)
    compiled = with_model(prompt, compile_model())
    assert_same(bench.run(compiled), plain)
    assert_same(bench.run(with_model(prompt, changed(kind), compile_model())), expected)
    assert_same(bench.run(again(compiled, 1)), plain)
    assert_same(bench.run(again(with_model(prompt, compile_model(), changed(kind)), 2)), expected)
    after = bench.run(again(compiled, 3))
    assert_same(after, plain)
    assert after.rise["region_compiles"] == 0
    assert after.bypasses == {}


# The embedding is computed outside of all blocks, by core's own forward: it costs no block, and on a GPU the capture.
NAMED = {
    "exchanged attention": "in the place of ComfyUI's attention",
    "exchanged torch attention": "torch.nn.functional.scaled_dot_product_attention",
}


@pytest.mark.parametrize("kind", NAMED)
def test_an_exchanged_function_is_named(bench: Bench, prompt: Any, kind: str) -> None:
    run = bench.run(with_model(prompt, changed(kind), compile_model()))
    assert "replaced_forward" in run.bypasses
    reasons = bench.texts("bypass")
    assert any(NAMED[kind] in reason for reason in reasons), reasons
