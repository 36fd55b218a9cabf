"""Which models are copied for a clone that shares no modules: not those with code around this very one.

DynamicVRAM needs a GPU, but the decision can be tested anywhere.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

# Patches whose code refers to the module that it replaces, or is on the model itself.
AROUND_THIS_COPY = ["replaced_forward", "exchanged_network", "changed_in_place"]


@pytest.fixture(scope="module")
def patches(core: SimpleNamespace) -> ModuleType:
    """The test pack's changes of a model, by name."""
    return importlib.import_module("resolute_tiny_models.patches")


@pytest.fixture
def patcher(core: SimpleNamespace) -> Any:
    """A ModelPatcher of a new tiny model."""
    (made,) = core.tiny_model().build(seed=0, kind="sd")
    return made


@pytest.fixture
def unshared(core: SimpleNamespace) -> Callable[[Any], Any]:
    found: Callable[[Any], Any] = core.ours("weights.unshared_clone").unshared_clone
    return found


@pytest.fixture
def reaches(unshared: Any) -> Callable[[Any], bool]:
    """Whether code around a model prevents a copy of it."""
    return lambda patcher: unshared(patcher).model is patcher.model


def test_a_model_and_its_clones_are_copied(patcher: Any, reaches: Any) -> None:
    assert not reaches(patcher)
    assert not reaches(patcher.clone())


def test_changes_that_a_copy_would_have_too_prevent_none(patcher: Any, patches: ModuleType, reaches: Any) -> None:
    kinds = [kind for kind in patches.APPLY if kind not in AROUND_THIS_COPY]
    assert len(kinds) > 10
    for kind in kinds:
        changed = patcher.clone()
        patches.APPLY[kind](changed)
        assert not reaches(changed), kind


@pytest.mark.parametrize("kind", AROUND_THIS_COPY)
def test_changes_of_this_copy_are_detected(patcher: Any, patches: ModuleType, reaches: Any, kind: str) -> None:
    changed = patcher.clone()
    patches.APPLY[kind](changed)
    assert reaches(changed)


class Holder:
    """A callable that refers to a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)


@pytest.mark.parametrize(
    "around",
    [lambda block: torch.nn.Sequential(block), Holder, lambda block: functools.partial(block.forward)],
    ids=["a module", "an object", "a partial"],
)
def test_callables_that_refer_to_a_module_are_detected(patcher: Any, reaches: Any, around: Any) -> None:
    changed = patcher.clone()
    block = patcher.model.diffusion_model.middle_block
    changed.add_object_patch("diffusion_model.middle_block", around(block))
    assert reaches(changed)
    wrapped = patcher.clone()
    wrapped.add_wrapper("diffusion_model", around(block))
    assert reaches(wrapped)


def test_resolutes_own_nodes_prevent_none_in_any_order(core: SimpleNamespace, patcher: Any, reaches: Any) -> None:
    compiled = core.ours("compile.diffusion_model").compile_diffusion_model
    cached = core.ours("deepcache.node").add_deepcache
    settings = core.ours("deepcache.schedule").Settings()
    assert not reaches(compiled(patcher, "eager"))
    assert not reaches(cached(compiled(patcher, "eager"), settings))
    assert not reaches(compiled(cached(patcher, settings), "eager"))


def test_a_clones_patch_that_comfyui_applied_is_not_a_change_of_the_model(
    core: SimpleNamespace, patcher: Any, reaches: Any
) -> None:
    compiled = core.ours("compile.diffusion_model").compile_diffusion_model(patcher, "eager")
    compiled.patch_model()
    try:
        assert "_forward" in vars(patcher.model.diffusion_model)
        assert not reaches(patcher)
    finally:
        compiled.unpatch_model()


@pytest.mark.parametrize("paged", [True, False])
def test_a_copy_shares_the_weights_and_runs_no_hook_of_the_original(
    core: SimpleNamespace, patcher: Any, unshared: Any, monkeypatch: pytest.MonkeyPatch, paged: bool
) -> None:
    monkeypatch.setattr(type(patcher), "is_dynamic", lambda _: paged)
    copied = unshared(patcher).model
    theirs = dict(patcher.model.named_parameters())
    for name, weight in copied.named_parameters():
        assert weight.data_ptr() == theirs[name].data_ptr()
        assert (weight is theirs[name]) is paged, "loading writes to a Parameter that is not paged"
    copied.diffusion_model.register_forward_hook(lambda *_: None)
    assert not patcher.model.diffusion_model._forward_hooks


def test_a_model_is_copied_once_and_its_copy_never(patcher: Any, unshared: Any) -> None:
    first, second = unshared(patcher), unshared(patcher.clone())
    assert first.model is second.model is unshared(first).model


def test_a_backend_that_cannot_read_pages_asks_for_ordinary_weights(
    core: SimpleNamespace, patcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = core.ours("compile.diffusion_model").compile_diffusion_model
    packages = core.inside("backends.oneflow.packages")
    monkeypatch.setattr(packages, "version_of", lambda _: "0.9.0")
    monkeypatch.setattr("sys.platform", "linux")
    assert compiled(patcher, "oneflow").model is patcher.model
    monkeypatch.setattr(type(patcher), "is_dynamic", lambda _: True)
    with pytest.raises(Exception, match=r"DynamicVRAM moves them. Start ComfyUI with --disable-dynamic-vram"):
        compiled(patcher, "oneflow")
    assert compiled(patcher, "eager").model is patcher.model


def test_a_comfyui_without_the_function_unloads_a_model_and_its_clones_alone(
    core: SimpleNamespace, patcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    management = core.comfy.model_management
    (other,) = core.tiny_model().build(seed=1, kind="sd")
    monkeypatch.setattr(management, "current_loaded_models", [])
    monkeypatch.delattr(management, "unload_model_and_clones", raising=False)  # before ComfyUI 0.23.0
    management.load_models_gpu([patcher, other])
    assert len(management.current_loaded_models) == 2
    core.ours("comfyui.version").unload_everywhere(patcher.clone())
    assert [loaded.model for loaded in management.current_loaded_models] == [other]
