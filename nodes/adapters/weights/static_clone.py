"""Clones of a model patcher whose weights stay at fixed addresses.

With DynamicVRAM, ComfyUI's default on NVIDIA, weights are paged in per operation and have no stable address. Core's
`clone(disable_dynamic=True)` reads the file again and builds a second model on *every* call. Here that happens once per
loaded model, and later clones share this static model. If core cannot read the file again (a ControlNet's loader, those
of some packs), the static model is a copy. It cannot share memory: paged weights are read-only views of the file, and
writing to them crashes the process.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from typing import Any

import comfy.model_management
import comfy.model_patcher
import torch

from ....compile_cache.foreign.attributes import replaced_methods
from ..comfyui import version
from .model_copy import Share, copy_model

logger = logging.getLogger(__name__)

OUR_INJECTIONS = "resolute"  # the key of those that keep our patches in place

# The original model -> a patcher of its static model, which lives as long as the original. It is the parent of all its
# clones, so after a clone is collected, core can still unload what it had loaded.
_static_patchers: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()
# The same for copies whose weights are paged, see `unshared_clone`.
_copies: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()


def static_clone(patcher: Any, dtype: torch.dtype | None = None) -> Any:
    """A clone of a model patcher with ordinary weights if ComfyUI can make one, else a plain clone.

    dtype: to convert the weights to, for a loader that leaves them in the file's dtype because paging casts them on
    their way in (a VAE's). ComfyUI versions without `supports_static_clone` do not page; there the clone is plain.
    """
    if not version.is_dynamic(patcher) or not version.supports_static_clone(patcher):
        return patcher.clone()
    if _is_bound_to_model(patcher):
        logger.warning(
            "Resolute: a node before the compile node put code around this copy of the model, so it stays with "
            "DynamicVRAM: its weights are paged, and it runs without compiling. Put that node after the compile node."
        )
        return patcher.clone()
    clone = _clone_around(_static_patcher_of(patcher, dtype), patcher)
    for name, models in clone.additional_models.items():
        if name == version.GPU_COPIES:
            clone.additional_models[name] = [static_clone(model, dtype) for model in models]
    return clone


def unshared_clone(patcher: Any, static: bool) -> Any:
    """A clone with a copy of the model, so that a patch of it does not reach the original. static: see `static_clone`.

    For models that core may load twice at once (a ControlNet, compiled and not, in one chain). The copy shares host
    memory unless it is static and the original's weights are paged.
    """
    dynamic = version.is_dynamic(patcher)
    if not version.supports_static_clone(patcher) or _is_bound_to_model(patcher) or (dynamic and static):
        return static_clone(patcher)
    if any(patcher.model is other.model for other in (*_static_patchers.values(), *_copies.values())):
        return patcher.clone()
    if not dynamic:
        return _clone_around(_static_patcher_of(patcher, None), patcher)
    if patcher.model not in _copies:
        version.unload_everywhere(patcher)
        model = copy_model(patcher.model, Share.WEIGHTS)
        _copies[patcher.model] = type(patcher)(model, patcher.load_device, patcher.offload_device)
    return _clone_around(_copies[patcher.model], patcher)


def _static_patcher_of(patcher: Any, dtype: torch.dtype | None) -> Any:
    static = _static_patchers.get(patcher.model)
    if static is None:
        if version.is_dynamic(patcher) and getattr(patcher, "cached_patcher_init", None) is not None:
            model = patcher.clone(disable_dynamic=True).model
        else:
            model = _copy_of_model(patcher)
        if dtype is not None:
            model.to(dtype)
        static = comfy.model_patcher.ModelPatcher(model, patcher.load_device, patcher.offload_device)
        _static_patchers[patcher.model] = static
    return static


def _clone_around(static: Any, patcher: Any) -> Any:
    leaves_paging = version.is_dynamic(patcher) and not version.is_dynamic(static)
    options = {"disable_dynamic": True} if leaves_paging else {}
    clone = patcher.clone(model_override=static.get_clone_model_override(), **options)
    version.make_clone_of(clone, static)
    clone.parent = static
    return clone


def _is_bound_to_model(patcher: Any) -> bool:
    """True if another pack's code refers to this model's modules, or is set on them: a static clone would lose it."""
    others = [given for key, given in patcher.injections.items() if key != OUR_INJECTIONS]
    if any(others) or _was_changed_in_place(patcher):
        return True
    modules = {id(module) for module in patcher.model.modules()}

    def reaches(value: Any, depth: int = 2) -> bool:
        if inspect.ismethod(value) and id(value.__self__) in modules:
            return True
        if isinstance(value, torch.nn.Module):
            return any(id(module) in modules for module in value.modules())
        return depth > 0 and any(reaches(part, depth - 1) for part in _references(value))

    wrappers = [each for kinds in patcher.wrappers.values() for given in kinds.values() for each in given]
    return any(reaches(value) for value in (*patcher.object_patches.values(), *wrappers))


def _was_changed_in_place(patcher: Any) -> bool:
    """True if a pack replaced methods on the model itself (PuLID), not through the patcher."""
    patched = set(patcher.object_patches_backup)  # by ComfyUI, for the clone that is loaded
    return any(
        (f"{name}.{method}" if name else method) not in patched
        for name, module in patcher.model.named_modules()
        for method, _ in replaced_methods(module)
    )


def _references(value: Any) -> list[Any]:
    """The objects that a callable refers to: closure, arguments, attributes. Not a patcher's: many keep one at hand."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if inspect.isfunction(value):
        return [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
    if isinstance(value, comfy.model_patcher.ModelPatcher) or not callable(value):
        return []
    return list(getattr(value, "__dict__", {}).values())


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (an empty cell raises)
    except ValueError:
        return False
    return True


def _copy_of_model(patcher: Any) -> torch.nn.Module:
    """A copy of the model whose weights are not paged. It has its own memory if the original's are: those are a view of
    the file, and ComfyUI's weight hooks write to weights that stay on the host.
    """
    version.unload_everywhere(patcher)
    return copy_model(patcher.model, Share.NOTHING if version.is_dynamic(patcher) else Share.MEMORY)
