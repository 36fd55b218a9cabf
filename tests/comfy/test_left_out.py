"""`leave_out` of Compile Model: named blocks run eagerly, the rest is compiled, and the report says so."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.errors import PromptError

from .rig import Bench, Run, assert_same, compile_model, failure_of, node, with_model

STEPS = 2


@pytest.fixture
def prompt(tiny_prompt: Any, seed: int) -> Any:
    return tiny_prompt(seed=seed, steps=STEPS, width=136, height=104)


def leaving_out(names: str) -> dict[str, Any]:
    compiles = compile_model()
    compiles["inputs"]["leave_out"] = names
    return compiles


def test_only_the_named_blocks_run_eagerly(bench: Bench, warm: Run, prompt: Any, tiny_prompt: Any) -> None:
    stock = bench.run(prompt)
    ours = bench.run(with_model(prompt, leaving_out("ResBlock, middle_block")))
    assert_same(ours, stock)
    assert ours.bypasses == {"left_out": STEPS}
    assert ours.rise["region_compiles"] == 0
    prompt["sample"]["inputs"]["seed"] += 100_000
    whole = bench.run(with_model(prompt, compile_model()))
    assert whole.bypasses == {}
    assert 0 < ours.rise["region_calls"] < whole.rise["region_calls"]


def test_the_report_names_them(bench: Bench, warm: Run, prompt: Any) -> None:
    changed = with_model(prompt, leaving_out("output_blocks.0"))
    changed["report"] = node("ResoluteReport", any=["sample", 0])
    text = bench.run(changed).history["outputs"]["report"]["text"][0]
    (line,) = [line for line in text.splitlines() if line.startswith("left out of compiling: ")]
    assert "output_blocks.0" in line


def test_an_unknown_name_stops_the_prompt_and_lists_those_that_exist(bench: Bench, prompt: Any) -> None:
    message = failure_of(bench.client, with_model(prompt, leaving_out("ResBlock\nMLP")))
    assert "leave_out has 'MLP', which this model does not have" in message
    assert "BasicTransformerBlock, ResBlock, SpatialTransformer" in message
    assert "input_blocks, middle_block, out, output_blocks" in message


def test_a_model_without_known_blocks_has_nothing_to_leave_out(bench: Bench, prompt: Any) -> None:
    prompt["model"] = node("ResoluteTestUnknownModel", shape="split forward")
    with pytest.raises(PromptError, match="no block that Resolute compiles"):
        bench.run(with_model(prompt, leaving_out("ResBlock")))
