"""Install a forward patch in a model patcher, with callbacks for loading, sampling and unloading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import comfy.utils
import torch
from comfy.patcher_extension import CallbacksMP

from ....compile_cache.backends import registry
from ....compile_cache.keys import Role
from ..blocks.families import FamilyHooks
from ..restart import preload
from .compiled_forward import CompiledForward
from .forward_patch import ForwardPatch
from .patch_place import keep_patches_in_place

_KEY = "resolute"


def install_compiled_forward(
    patcher: Any,
    name: str,
    backend: str,
    role: Role,
    families: Sequence[FamilyHooks],
    node_id: str | None,
    left_out: tuple[str, ...] = (),
    cell: int = 8,
) -> CompiledForward:
    """Compile the method `name` ("diffusion_model._forward") of the model of `patcher`, which must be our own clone.

    cell: pixels to a side of a latent cell, for people. The CompiledForward is an object patch, which ComfyUI applies
    and restores for each clone.
    """
    module = _holder(patcher, name)
    label = type(getattr(patcher.model, "model_config", patcher.model)).__name__  # "SDXL"
    inner = patcher.get_model_object(name)
    forward = CompiledForward(module, inner, backend, role, families, node_id, label, left_out, cell)
    install_patch(patcher, name, forward)
    preload.load_first(module)
    chosen, capabilities, _ = registry.resolve(backend, patcher.load_device.type)
    if capabilities.compiles:
        forward.expect_regions(chosen.name)
    return forward


def install_patch(patcher: Any, name: str, patch: ForwardPatch) -> None:
    """Replace the method `name` of the model of `patcher`, our own clone, and of later clones of it."""
    patcher.add_object_patch(name, patch)
    keep_patches_in_place(patcher)
    for moment, callback in _CALLBACKS.items():
        patcher.remove_callbacks_with_key(moment, _KEY)
        patcher.add_callback_with_key(moment, _KEY, callback)


def _holder(patcher: Any, name: str) -> torch.nn.Module:
    """The module that has the method `name`."""
    path = name.rpartition(".")[0]
    module: torch.nn.Module = patcher.get_model_object(path) if path else patcher.model
    return module


# Clones share the callbacks of their patcher, so a callback acts on the patches of the patcher that it is called with.


def _for_each_compiled(action: Callable[[CompiledForward], None]) -> Callable[..., None]:
    def callback(patcher: Any, *_: Any) -> None:
        for patch in list(patcher.object_patches.values()):
            if isinstance(patch, CompiledForward):
                action(patch)

    return callback


def _sampling_begins(patcher: Any) -> None:
    for name, patch in list(patcher.object_patches.items()):
        if not isinstance(patch, ForwardPatch) or not patch.is_alive:
            continue
        method = name.rpartition(".")[2]
        if method not in vars(patch.module) and _holder(patcher, name) is patch.module:
            setattr(patch.module, method, patch)  # a clone that was collected after this one was loaded removed it
        if isinstance(patch, CompiledForward):
            patch.begin()


def _weights_detached(patcher: Any, unpatched: bool) -> None:
    sampling = getattr(patcher.model, "current_patcher", None)
    if not unpatched and sampling is not None and sampling is not patcher:
        return  # a clone is garbage collected while another one samples with the same forward
    for patch in list(patcher.object_patches.values()):
        if isinstance(patch, ForwardPatch):
            patch.weights_detached(unpatched)


def _patch_clone(patcher: Any, clone: Any) -> None:
    """Core's copies of a model for other GPUs are clones of the patcher around another module: patch that one."""
    for name, forward in list(clone.object_patches.items()):
        if not isinstance(forward, ForwardPatch) or not forward.is_alive:
            continue
        module = _holder(clone, name)
        if module is forward.module:
            continue
        clone.add_object_patch(name, forward.for_copy(module, comfy.utils.get_attr(clone.model, name)))


_CALLBACKS = {
    CallbacksMP.ON_PRE_RUN: _sampling_begins,
    CallbacksMP.ON_CLEANUP: _for_each_compiled(CompiledForward.end),
    CallbacksMP.ON_LOAD: _for_each_compiled(CompiledForward.weights_loaded),
    CallbacksMP.ON_DETACH: _weights_detached,
    CallbacksMP.ON_CLONE: _patch_clone,
}
