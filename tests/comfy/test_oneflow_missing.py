"""Without OneFlow, the nodes still list it, choosing it fails with what to install, and everything else works."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import pytest

from .rig import Bench, assert_same, compile_model, compiled, failure_of, with_model, with_vae


def test_this_environment_has_no_oneflow() -> None:
    """The other tests of this file need an environment without OneFlow; tests/oneflow needs one with it."""
    for package in ("oneflow", "onediff"):
        with pytest.raises(PackageNotFoundError):
            version(package)


@pytest.mark.parametrize("name", ["ResoluteCompileModel", "ResoluteCompileVAEDecode", "ResoluteCompileControlNet"])
def test_the_node_lists_it(bench: Bench, name: str) -> None:
    inputs = bench.client.get(f"/object_info/{name}")[name]["input"]["required"]
    kind, options = inputs["backend"]
    assert "oneflow" in (options.get("options") if kind == "COMBO" else kind)


def test_choosing_it_says_what_to_install_and_the_next_prompt_works(bench: Bench, tiny_prompt: Any, seed: int) -> None:
    prompt = tiny_prompt(seed=seed, width=64, height=64)
    for ours in (with_model(prompt, compile_model("oneflow")), with_vae(prompt, "oneflow")):
        message = failure_of(bench.client, ours)
        assert "OneFlow is not installed" in message
        assert "requirements/oneflow.txt" in message
    plain = bench.run(prompt)
    assert_same(bench.run(compiled(prompt, "eager")), plain)


def test_a_backend_that_cannot_read_pages_asks_for_ordinary_weights(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (patcher,) = core.tiny_model().build(seed=0, kind="sd")
    compile_model_with = core.ours("patch.diffusion_model").compile_diffusion_model
    packages = core.inside("backends.oneflow.packages")
    monkeypatch.setattr(packages, "version_of", lambda _: "0.9.0")
    monkeypatch.setattr("sys.platform", "linux")
    assert compile_model_with(patcher, "oneflow").model is patcher.model
    monkeypatch.setattr(type(patcher), "is_dynamic", lambda _: True)
    with pytest.raises(Exception, match=r"DynamicVRAM moves them. Start ComfyUI with --disable-dynamic-vram"):
        compile_model_with(patcher, "oneflow")
    assert compile_model_with(patcher, "eager").model is patcher.model
