"""Install a forward patch in a model patcher, with callbacks for loading, sampling and unloading.

ComfyUI sets and restores an object patch by its path. Once a pack has put a wrapper into `model.decoder` (KJNodes'
TorchCompileVAE does so on the model itself), the path "decoder.forward" leads into the wrapper, and to set or restore
a forward there would undo the wrapper. Core injects after it has set the patches of a patcher and ejects before it
restores them, so our injections correct both. Core also ejects and injects around other work on a loaded model (LoRA
hooks, a partial unload), so the injections skip a patch whose path still leads to its module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import comfy.utils
import torch
from comfy.patcher_extension import CallbacksMP, PatcherInjection

from ....compile_cache.code_identity.attributes import is_own
from ..process import preload
from ..process.compile_request import CompileRequest
from .compiled_forward import CompiledForward
from .forward_patch import NOTHING, ForwardPatch

_KEY = "resolute"


def install_compiled_forward(patcher: Any, name: str, request: CompileRequest) -> CompiledForward:
    """Compile the method `name` ("diffusion_model._forward") of the model of `patcher`, which must be our own clone.

    The CompiledForward is an object patch, which ComfyUI applies and restores for each clone. Raises UserError for a
    name of `left_out` that the model does not have.
    """
    module = _holder(patcher, name)
    forward = CompiledForward(module, patcher.get_model_object(name), request)
    forward.count_regions()
    install_patch(patcher, name, forward)
    preload.load_first(module)
    return forward


def install_patch(patcher: Any, name: str, patch: ForwardPatch) -> None:
    """Replace the method `name` of the model of `patcher`, our own clone, and of later clones of it."""
    patcher.add_object_patch(name, patch)
    patcher.set_injections(_KEY, [PatcherInjection(_after_patching, _before_restoring)])
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
            setattr(patch.module, method, patch)  # a clone collected after this one was loaded removed the patch
        if isinstance(patch, CompiledForward):
            patch.begin(patcher.model)


def _weights_detached(patcher: Any, unpatched: bool) -> None:
    sampling = getattr(patcher.model, "current_patcher", None)
    if not unpatched and sampling is not None and sampling is not patcher:
        return  # a clone is garbage collected while another one samples with the same forward
    for patch in list(patcher.object_patches.values()):
        if isinstance(patch, ForwardPatch):
            patch.weights_detached(unpatched)


def _patch_clone(patcher: Any, clone: Any) -> None:
    """For other GPUs, core clones the patcher around a copy of the module: patch that copy.

    A clone around the same model has our patches already, even if another pack replaced the network inside it.
    """
    if clone.model is patcher.model:
        return
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


# --- keep each patch on the module that it was made for ---------------------------------------------------------


def _after_patching(patcher: Any) -> None:
    for name, method, patch in _patches(patcher):
        holder = _at_path(patcher, name)
        if holder is patch.module:
            continue
        if vars(holder).get(method) is patch:
            _restore(holder, method, patcher.object_patches_backup.pop(name, NOTHING))
        found = vars(patch.module).get(method, NOTHING)
        if isinstance(found, ForwardPatch):
            patch.displaced = found.displaced
        elif not is_own(patch.module, method, found):  # not core's leftover, which would keep the module alive
            patch.displaced = found
        setattr(patch.module, method, patch)


def _before_restoring(patcher: Any) -> None:
    sampling = getattr(patcher.model, "current_patcher", None)
    if sampling is not None and sampling is not patcher:
        return  # a clone is garbage collected while another one samples with the same patches
    for name, method, patch in _patches(patcher):
        if _at_path(patcher, name) is patch.module:
            continue
        before = patcher.object_patches_backup.pop(name, patch.displaced)
        if vars(patch.module).get(method) is patch:
            _restore(patch.module, method, before)


def _at_path(patcher: Any, name: str) -> Any:
    """The object that is now at the path of the module whose method `name` is patched."""
    path = name.rpartition(".")[0]
    return comfy.utils.get_attr(patcher.model, path) if path else patcher.model


def _patches(patcher: Any) -> Iterator[tuple[str, str, ForwardPatch]]:
    for name, patch in list(patcher.object_patches.items()):
        if isinstance(patch, ForwardPatch) and patch.is_alive:
            yield name, name.rpartition(".")[2], patch


def _restore(module: torch.nn.Module, method: str, before: Any) -> None:
    """Remove our patch from `module`. before: the value that core read with `getattr` when it set the patch."""
    while isinstance(before, ForwardPatch):
        before = before.inner
    del vars(module)[method]
    # Do not set a method that the class provides anyway: the module's own bound method would keep the module alive.
    if before is not NOTHING and getattr(module, method, None) != before:
        setattr(module, method, before)
