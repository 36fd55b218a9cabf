"""Clones of a model patcher that have a copy of the model, so that a patch of one does not reach the other.

For models that core may load twice at once (a ControlNet, compiled and not, in one chain). A copy has its own modules
and shares the memory of the weights.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from typing import Any

import comfy.model_patcher
import torch

from ....compile_cache.foreign.attributes import is_own, replaced_methods
from ..comfyui import version
from ..comfyui.module_attributes import PAGING, WEIGHT_PATCHES

OUR_INJECTIONS = "resolute"  # the key of those that keep our patches in place

# The original model -> a patcher of its copy, which lives as long as the original. It is the parent of all its clones,
# so after a clone is collected, core can still unload what it had loaded.
_copies: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()


def unshared_clone(patcher: Any) -> Any:
    """A clone of a model patcher with a copy of its model; a plain clone where that is impossible.

    That is so in a ComfyUI without `clone(model_override)`, and where another pack put code around this very model.
    """
    if not version.supports_model_override(patcher) or _is_bound_to_model(patcher):
        return patcher.clone()
    if any(patcher.model is other.model for other in _copies.values()):
        return patcher.clone()
    if patcher.model not in _copies:
        version.unload_everywhere(patcher)
        model = _copy_of(patcher.model, version.is_dynamic(patcher), {})
        _copies[patcher.model] = type(patcher)(model, patcher.load_device, patcher.offload_device)
    original = _copies[patcher.model]
    clone = patcher.clone(model_override=original.get_clone_model_override())
    version.make_clone_of(clone, original)
    clone.parent = original
    return clone


def _is_bound_to_model(patcher: Any) -> bool:
    """True if another pack's code refers to this model's modules, or is set on them: a copy would lose it."""
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


def _copy_of(module: torch.nn.Module, is_paged: bool, done: dict[int, torch.nn.Module]) -> torch.nn.Module:
    """New modules and dictionaries; other plain attributes are shared with the original.

    Nothing of paging is copied, so each class decides again whether its weights are cast on their way in. done: copies
    by the identity of their originals.
    """
    if id(module) in done:
        return done[id(module)]
    copied = done[id(module)] = copy.copy(module)
    own = vars(copied)
    for name, value in list(own.items()):
        # When ComfyUI undid an object patch, it left a bound method of the old module there.
        if name in PAGING or is_own(module, name, value):
            del own[name]
        elif name in WEIGHT_PATCHES:
            own[name] = []
        elif name == "current_patcher":
            own[name] = None
        elif isinstance(value, dict):  # hooks of one are not hooks of the other
            own[name] = copy.copy(value)
    own["_parameters"] = {
        name: weight if is_paged else _over_same_memory(copied, name, weight)
        for name, weight in module._parameters.items()
    }
    own["_modules"] = {
        name: child if child is None else _copy_of(child, is_paged, done) for name, child in module._modules.items()
    }
    return copied


def _over_same_memory(module: torch.nn.Module, name: str, weight: Any) -> Any:
    """A Parameter of its own, because loading writes to it, over the same memory if that has the model's dtype."""
    if type(weight) is not torch.nn.Parameter:  # none at all; or quantized, which loading replaces and never writes to
        return weight
    dtype = getattr(module, f"{name}_comfy_model_dtype", None) or weight.dtype
    return torch.nn.Parameter(weight.data.to(dtype), requires_grad=False)
