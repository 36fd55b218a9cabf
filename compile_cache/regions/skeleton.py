"""A copy of a block without its weights: it can be traced at any time, whatever happens to the block meanwhile."""

from __future__ import annotations

import copy
from typing import Any

import torch

from .weight_parts import form_of, is_plain

_CHANGING = (list, dict, set)  # a load of a LoRA adds to such lists in place


def skeleton_of(module: torch.nn.Module) -> torch.nn.Module:
    """The module and all below it, with weights on the device "meta". It shares the other attributes, but for copies of
    lists, dictionaries and sets.
    """
    return _copy(module, {}, {})


def _copy(module: torch.nn.Module, made: dict[int, torch.nn.Module], weights: dict[int, Any]) -> torch.nn.Module:
    if id(module) in made:
        return made[id(module)]
    new = made[id(module)] = module.__class__.__new__(module.__class__)
    own = new.__dict__
    own.update((name, copy.copy(v) if type(v) in _CHANGING else v) for name, v in module.__dict__.items())
    own.pop("forward", None)  # our hook; with another pack's, the block runs eagerly
    for member in ("_parameters", "_buffers"):
        own[member] = {name: _without_contents(each, weights) for name, each in module.__dict__[member].items()}
    own["_modules"] = {
        name: None if child is None else _copy(child, made, weights) for name, child in module._modules.items()
    }
    return new


def _without_contents(weight: Any, made: dict[int, Any]) -> Any:
    if weight is None:
        return None
    if id(weight) not in made:
        form = form_of(weight)
        with torch.no_grad():
            if form is not None:
                made[id(weight)] = form.put_together([_meta(part) for part in form.parts(weight)], weight)
            elif is_plain(weight):
                empty = _meta(weight)
                is_parameter = isinstance(weight, torch.nn.Parameter)
                made[id(weight)] = torch.nn.Parameter(empty, requires_grad=False) if is_parameter else empty
            else:
                made[id(weight)] = copy.copy(weight)
    return made[id(weight)]


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
