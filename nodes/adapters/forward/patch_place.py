"""Keep a patch on its own module where another pack has put a wrapper into that module's place.

ComfyUI sets and restores an object patch by its path. Once a pack has put a wrapper into `model.decoder` (KJNodes'
TorchCompileVAE does so on the model itself), the path "decoder.forward" leads into the wrapper, and to set or restore
a forward there would undo the wrapper. Core injects after it has set the patches of a patcher and ejects before it
restores them, so both are put right there. Core also ejects and injects around other work on a loaded model (LoRA
hooks, a partial unload), so a patch that is where its path leads is left to core.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import comfy.utils
import torch
from comfy.patcher_extension import PatcherInjection

from ..weights.static_clone import OUR_INJECTIONS
from .forward_patch import ForwardPatch

_NOTHING = object()


def keep_patches_in_place(patcher: Any) -> None:
    """Keep each ForwardPatch of `patcher`, a clone of ours, and of its clones, on the module that it was made for."""
    patcher.set_injections(OUR_INJECTIONS, [PatcherInjection(_after_patching, _before_restoring)])


def _after_patching(patcher: Any) -> None:
    for name, method, patch in _patches(patcher):
        holder = _holder(patcher, name)
        if holder is patch.module:
            continue
        if vars(holder).get(method) is patch:
            _restore(holder, method, patcher.object_patches_backup.pop(name, _NOTHING))
        setattr(patch.module, method, patch)


def _before_restoring(patcher: Any) -> None:
    sampling = getattr(patcher.model, "current_patcher", None)
    if sampling is not None and sampling is not patcher:
        return  # a clone that is collected while another one samples with the same patches
    for name, method, patch in _patches(patcher):
        if _holder(patcher, name) is patch.module:
            continue
        before = patcher.object_patches_backup.pop(name, _NOTHING)
        if vars(patch.module).get(method) is patch:
            _restore(patch.module, method, before)


def _holder(patcher: Any, name: str) -> Any:
    """What is now at the place of the module whose method `name` is patched."""
    path = name.rpartition(".")[0]
    return comfy.utils.get_attr(patcher.model, path) if path else patcher.model


def _patches(patcher: Any) -> Iterator[tuple[str, str, ForwardPatch]]:
    for name, patch in list(patcher.object_patches.items()):
        if isinstance(patch, ForwardPatch) and patch.is_alive:
            yield name, name.rpartition(".")[2], patch


def _restore(module: torch.nn.Module, method: str, before: Any) -> None:
    """Take our patch off `module`. before: what core found when it set the patch, by `getattr`."""
    while isinstance(before, ForwardPatch):
        before = before.inner
    del vars(module)[method]
    # What the class gives anyway is not set: a bound method of the module itself would keep it alive.
    if before is not _NOTHING and getattr(module, method, None) != before:
        setattr(module, method, before)
