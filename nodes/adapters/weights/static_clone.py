"""A clone whose weights stay where they are.

With DynamicVRAM, ComfyUI's default on NVIDIA, weights are paged in per operation and have no stable address. Core's way
out, `clone(disable_dynamic=True)`, reads the file again and builds a second model on *every* call. Here that happens
once per loaded model: later clones share the first one's. Where the loader left core no way to read the file again (a
ControlNet's, and those of other packs), the second model is a copy. Around the same memory it could not be: what a
paged model has is a read-only view of the file, and to write into that ends the process.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import weakref
from typing import Any

import comfy.model_management
import comfy.model_patcher
import torch

from ....compile_cache.regions.foreign_code import is_own, replaced_methods
from ....compile_cache.regions.structure import PAGING
from ..comfyui import version

logger = logging.getLogger(__name__)

# The original model -> a patcher around its delegate, which lives as long as the original does. It is the parent of all
# clones: what a dead clone had loaded is then core's to unload, through a patcher of the same model.
_delegates: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()


def static_clone(patcher: Any, dtype: torch.dtype | None = None) -> Any:
    """A clone of a model patcher with ordinary weights, where ComfyUI can make one; else a plain clone.

    `dtype`: what the weights are computed in, where the loader leaves them as they are in the file because paging
    casts them on the way (a VAE's). Without `supports_static_clone` (older versions do not page) the clone is plain.
    """
    if not version.is_dynamic(patcher) or not version.supports_static_clone(patcher):
        return patcher.clone()
    if _reaches_into_model(patcher):
        logger.warning(
            "Resolute: a node before the compile node put code around this very copy of the model, which stays with "
            "DynamicVRAM: its weights are paged, so it runs as it is. Put that node after the compile node."
        )
        return patcher.clone()
    clone = _clone_around(_delegate_of(patcher, dtype), patcher)
    for name, models in clone.additional_models.items():
        if name == version.GPU_COPIES:
            clone.additional_models[name] = [static_clone(model, dtype) for model in models]
    return clone


def own_clone(patcher: Any) -> Any:
    """A clone around a copy of the model, with ordinary weights: a hook on it is not there for the original.

    For models that core may load twice at once (a ControlNet, compiled and not, in one chain). Host memory is shared.
    """
    if version.is_dynamic(patcher) or not version.supports_static_clone(patcher) or _reaches_into_model(patcher):
        return static_clone(patcher)
    if any(patcher.model is delegate.model for delegate in _delegates.values()):  # compiled before
        return patcher.clone()
    return _clone_around(_delegate_of(patcher, None), patcher)


def _delegate_of(patcher: Any, dtype: torch.dtype | None) -> Any:
    delegate = _delegates.get(patcher.model)
    if delegate is None:
        if version.is_dynamic(patcher) and getattr(patcher, "cached_patcher_init", None) is not None:
            model = patcher.clone(disable_dynamic=True).model
        else:
            model = _twin(patcher)
        if dtype is not None:
            model.to(dtype)
        delegate = comfy.model_patcher.ModelPatcher(model, patcher.load_device, patcher.offload_device)
        _delegates[patcher.model] = delegate
    return delegate


def _clone_around(delegate: Any, patcher: Any) -> Any:
    options = {"disable_dynamic": True} if version.is_dynamic(patcher) else {}
    clone = patcher.clone(model_override=delegate.get_clone_model_override(), **options)
    # Core takes patchers of one identity for clones of one model, and hands a copy on another GPU from one to another:
    # a paging patcher cannot run on a copy that was not made for paging.
    clone.clone_base_uuid = delegate.clone_base_uuid
    clone.parent = delegate
    return clone


def _reaches_into_model(patcher: Any) -> bool:
    """Whether something computes with this very model's modules, or was put onto them: a clone would lose it."""
    if any(patcher.injections.values()) or _was_changed_in_place(patcher):
        return True
    modules = {id(module) for module in patcher.model.modules()}

    def reaches(value: Any, depth: int = 2) -> bool:
        if inspect.ismethod(value) and id(value.__self__) in modules:
            return True
        if isinstance(value, torch.nn.Module):
            return any(id(module) in modules for module in value.modules())
        return depth > 0 and any(reaches(part, depth - 1) for part in _parts(value))

    wrappers = [each for kinds in patcher.wrappers.values() for given in kinds.values() for each in given]
    return any(reaches(value) for value in (*patcher.object_patches.values(), *wrappers))


def _was_changed_in_place(patcher: Any) -> bool:
    """Whether a pack replaced methods on the model itself (PuLID), past the patcher."""
    patched = set(patcher.object_patches_backup)  # by ComfyUI, for whichever clone is loaded
    return any(
        (f"{name}.{method}" if name else method) not in patched
        for name, module in patcher.model.named_modules()
        for method, _ in replaced_methods(module)
    )


def _parts(value: Any) -> list[Any]:
    """What a callable holds: its closure, its arguments, its attributes. Not a whole patcher: many keep one at hand."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if inspect.isfunction(value):
        return [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
    if isinstance(value, comfy.model_patcher.ModelPatcher) or not callable(value):
        return []
    return list(getattr(value, "__dict__", {}).values())


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (it raises where there is nothing)
    except ValueError:
        return False
    return True


def _twin(patcher: Any) -> torch.nn.Module:
    """A copy of the model whose weights are not paged. What pages keep is a view of the file that nobody may write to,
    as hooks do with weights that stay on the host: then the copy has memory of its own.
    """
    version.unload_everywhere(patcher)
    return _copied(patcher.model, not version.is_dynamic(patcher), {})


def _copied(module: torch.nn.Module, shares_memory: bool, done: dict[int, torch.nn.Module]) -> torch.nn.Module:
    """New modules, Parameters and dictionaries; other plain attributes are shared.

    Without what paging left: whether weights are cast on the way is then for their class to say again.
    """
    if id(module) in done:
        return done[id(module)]
    twin = done[id(module)] = copy.copy(module)
    own = vars(twin)
    for name, value in list(own.items()):
        # A method of the old module stays behind where an object patch was taken back.
        if name in PAGING or is_own(module, name, value):
            del own[name]
        elif name in ("weight_function", "bias_function"):
            own[name] = []
        elif name == "current_patcher":
            own[name] = None
        elif isinstance(value, dict):  # what is hooked to one of them is not to the other
            own[name] = copy.copy(value)
    own["_parameters"] = {
        name: _copied_weight(twin, name, weight, shares_memory) for name, weight in module._parameters.items()
    }
    own["_modules"] = {
        name: child if child is None else _copied(child, shares_memory, done) for name, child in module._modules.items()
    }
    return twin


def _copied_weight(module: torch.nn.Module, name: str, weight: Any, shares_memory: bool) -> Any:
    if type(weight) is not torch.nn.Parameter:  # none, or quantized: then it is the wrapper that is replaced
        return weight
    # Paging casts a weight on its way from the file's dtype to the model's.
    dtype = getattr(module, f"{name}_comfy_model_dtype", None) or weight.dtype
    return torch.nn.Parameter(weight.data.to(dtype, copy=not shares_memory), requires_grad=False)
