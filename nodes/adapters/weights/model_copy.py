"""Copy a model whose weights may be paged, into one whose weights are ordinary Parameters."""

from __future__ import annotations

import copy
from enum import Enum
from typing import Any

import torch

from ....compile_cache.foreign.attributes import is_own
from ..comfyui.module_attributes import PAGING, WEIGHT_PATCHES


class Share(Enum):
    """The parts that a copy of a model has in common with the original."""

    NOTHING = "nothing"  # weights of its own, in the dtype that the model computes in
    MEMORY = "memory"  # Parameters of its own over the same memory, if that is their dtype
    WEIGHTS = "weights"  # the very Parameters, for a copy that pages them too


def copy_model(module: torch.nn.Module, share: Share) -> torch.nn.Module:
    """New modules, Parameters and dictionaries; other plain attributes are shared with the original.

    Nothing of paging is copied, so each class decides again whether its weights are cast on their way in.
    """
    return _copy_module(module, share, {})


def _copy_module(module: torch.nn.Module, share: Share, done: dict[int, torch.nn.Module]) -> torch.nn.Module:
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
        name: _copy_weight(copied, name, weight, share) for name, weight in module._parameters.items()
    }
    own["_modules"] = {
        name: child if child is None else _copy_module(child, share, done) for name, child in module._modules.items()
    }
    return copied


def _copy_weight(module: torch.nn.Module, name: str, weight: Any, share: Share) -> Any:
    # Of other types: none at all; or quantized, which loading replaces and never writes to.
    if share is Share.WEIGHTS or type(weight) is not torch.nn.Parameter:
        return weight
    # Paging casts a weight on its way in, from the file's dtype to the model's.
    dtype = getattr(module, f"{name}_comfy_model_dtype", None) or weight.dtype
    return torch.nn.Parameter(weight.data.to(dtype, copy=share is Share.NOTHING), requires_grad=False)
