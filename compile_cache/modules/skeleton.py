"""A copy of a block without its weights: it can be traced at any time, regardless of later changes to the block."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ..attribute_policy import PLAIN, ModuleAttributePolicy
from .gguf_weights import GGUFForm
from .weight_parts import form_of, is_plain

_CHANGING = (list, dict, set)  # loading a LoRA extends such lists in place


def skeleton_of(module: torch.nn.Module, policy: ModuleAttributePolicy = PLAIN) -> torch.nn.Module:
    """Return a copy of the module and all below it, with weights on the device "meta". Lists, dictionaries and sets are
    copied, other attributes shared, and bookkeeping is left out, because it may keep memory alive.
    """
    needed = (policy.casts, *policy.weight_patches)  # bookkeeping for a digest, but the module's code reads it
    made: dict[int, torch.nn.Module] = {}
    weights: dict[int, Any] = {}

    def copied(module: torch.nn.Module) -> torch.nn.Module:
        if id(module) in made:
            return made[id(module)]
        new = made[id(module)] = module.__class__.__new__(module.__class__)
        own = new.__dict__
        for name, value in module.__dict__.items():
            if name in needed or not policy.is_bookkeeping(name):
                own[name] = copy.copy(value) if type(value) in _CHANGING else value
        own.pop("forward", None)  # our hook; with another pack's, the block runs eagerly
        for member in ("_parameters", "_buffers"):
            own[member] = {name: _without_contents(each, weights) for name, each in module.__dict__[member].items()}
        own["_modules"] = {name: None if child is None else copied(child) for name, child in module._modules.items()}
        return new

    return copied(module)


def _without_contents(weight: Any, made: dict[int, Any]) -> Any:
    if weight is None:
        return None
    if id(weight) not in made:
        form = form_of(weight)
        with torch.no_grad():
            if isinstance(form, GGUFForm):
                made[id(weight)] = form.packed(_meta(*form.parts(weight)))
            elif form is not None:
                made[id(weight)] = form.rebuild([_meta(part) for part in form.parts(weight)], weight)
            elif is_plain(weight):
                empty = _meta(weight)
                is_parameter = isinstance(weight, torch.nn.Parameter)
                made[id(weight)] = torch.nn.Parameter(empty, requires_grad=False) if is_parameter else empty
            else:
                made[id(weight)] = torch.empty(0, device="meta")  # no region supports it, so no trace reads it
    return made[id(weight)]


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
