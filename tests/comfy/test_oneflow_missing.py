"""Without OneFlow, the nodes still list it, choosing it fails with what to install, and everything else works."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest

from scripts.errors import PromptError

from .rig import Bench, assert_same, compile_model, compiled, node, with_model


def test_this_environment_has_no_oneflow() -> None:
    """The other tests of this file need an environment without OneFlow; tests/oneflow needs one with it."""
    with pytest.raises(PackageNotFoundError):
        version("oneflow")


@pytest.mark.parametrize("name", ["ResoluteCompileModel", "ResoluteCompileVAEDecode", "ResoluteCompileControlNet"])
def test_the_node_lists_it(bench: Bench, name: str) -> None:
    inputs = bench.client.get(f"/object_info/{name}")[name]["input"]["required"]
    kind, options = inputs["backend"]
    assert "oneflow" in (options.get("options") if kind == "COMBO" else kind)


def test_choosing_it_fails_with_what_to_install(bench: Bench, tiny_prompt: Any, seed: int) -> None:
    with pytest.raises(PromptError) as caught:
        bench.run(with_model(tiny_prompt(seed=seed, width=64, height=64), compile_model("oneflow")))
    assert "OneFlow is not installed" in str(caught.value)
    assert "requirements-oneflow.txt" in str(caught.value)


def test_choosing_it_for_a_decoder_fails_in_the_same_way(bench: Bench, tiny_prompt: Any, seed: int) -> None:
    prompt = tiny_prompt(seed=seed, width=64, height=64)
    prompt["compiled-vae"] = node("ResoluteCompileVAEDecode", vae=["vae", 0], backend="oneflow")
    prompt["decode"]["inputs"]["vae"] = ["compiled-vae", 0]
    with pytest.raises(PromptError, match="OneFlow is not installed"):
        bench.run(prompt)


def test_the_next_prompt_with_another_backend_works(bench: Bench, tiny_prompt: Any, seed: int) -> None:
    prompt = tiny_prompt(seed=seed, width=64, height=64)
    plain = bench.run(prompt)
    assert_same(bench.run(compiled(prompt, "eager")), plain)
