"""The structure of a module: everything but its weights' values that a trace of it can depend on.

Two modules of equal structure run the same artifact. Too fine a structure costs a compile; too coarse a one costs a
wrong picture, so every plain attribute counts unless it is known not to matter.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from collections.abc import Iterable, Sequence

import torch

from ..keys import Literal
from .foreign_code import HOOKED

# What ComfyUI's paging of weights (DynamicVRAM) leaves on modules.
PAGING = frozenset(
    {
        "_v", "_v_block", "_v_block_faulted", "_v_signature", "_v_weight", "_v_bias",
        "_pins", "_pin_state", "_prefetch", "_comfy_graph", "comfy_cast_weights",
        "weight_lowvram_function", "bias_lowvram_function", "dynamic_vbars", "dynamic_pins", "dynamic_patchers",
    }
)  # fmt: skip

# Attributes that move without changing the computation: bookkeeping of torch and of ComfyUI's weight loading.
# `comfy_cast_weights` does matter; its effective value is part of the region key, where the weights are read.
VOLATILE = (
    PAGING
    | frozenset(vars(torch.nn.Module()))
    | {
        "prev_comfy_cast_weights",
        "comfy_patched_weights",
        "weight_function",
        "bias_function",
        "seed_key",
        "comfy_need_lazy_init_bias",
    }
)
# ComfyUI's note of the dtype that a weight is loaded in; the weight itself says so too.
_LOADED_AS = "_comfy_model_dtype"


# Digests by id(module), good for one survey: nothing may change in between.
Memo = dict[int, str]


def parts(module: torch.nn.Module, without: Sequence[str] = ()) -> list[tuple[str, torch.nn.Module]]:
    """`module` and everything below it, by name, but for the children `without`."""
    inside = tuple(f"{child}." for child in without)
    return [
        (name, part) for name, part in module.named_modules() if name not in without and not name.startswith(inside)
    ]


def structure_digest(module: torch.nn.Module, memo: Memo | None = None, without: Sequence[str] = ()) -> str:
    """A digest of classes, weights, their ties and the settings of `module` and everything below it.

    With `memo`, digests of parts are shared between calls: a survey of a whole model looks at each module once.
    `without`: children of `module` that do not count.
    """
    ties = _ties(part for _, part in parts(module, without))
    return _hash((ties, _digest(module, {} if memo is None else memo, is_root=True, without=without)))


def _digest(module: torch.nn.Module, memo: Memo, is_root: bool = False, without: Sequence[str] = ()) -> str:
    known = None if is_root else memo.get(id(module))
    if known is not None:
        return known
    kind = type(module)
    weights = tuple(
        (name, tuple(tensor.shape), tensor.stride(), str(tensor.dtype), type(tensor).__name__)
        for slots in (module._parameters, module._buffers)
        for name, tensor in slots.items()
        if tensor is not None
    )
    # Somebody's function runs before or after this module: never the same as any other module.
    hooks = tuple(id(hook) for hooks in (module._forward_hooks, module._forward_pre_hooks) for hook in hooks.values())
    children = tuple(
        (name, _digest(child, memo))
        for name, child in module._modules.items()
        if child is not None and name not in without
    )
    own = sorted(settings(module, is_root), key=lambda setting: setting[0])
    result = _hash((kind.__module__, kind.__qualname__, weights, tuple(own), hooks, children))
    if not is_root:
        memo[id(module)] = result
    return result


def _hash(plain: tuple[object, ...]) -> str:
    # repr tells plain values apart to the last bit (1, 1.0, True, "1"), and everything here is plain.
    return hashlib.sha256(repr(plain).encode()).hexdigest()


def settings(module: torch.nn.Module, is_root: bool) -> tuple[tuple[str, Literal], ...]:
    """The plain attributes of one module, by name, in the order in which they were set.

    `is_root`: it is the module that runs through the cache itself, not a part of it; what stands where it is hooked, or
    is left there by an object patch that ComfyUI took back, says nothing about it.
    """
    return tuple(
        (name, literal)
        for name, value in vars(module).items()
        if name not in VOLATILE and not name.endswith(_LOADED_AS) and not (is_root and name in HOOKED)
        for literal in _literal(value)
    )


def _ties(modules: Iterable[torch.nn.Module]) -> tuple[int, ...]:
    """Which weights are one and the same tensor."""
    numbers: dict[int, int] = {}
    return tuple(
        numbers.setdefault(id(tensor), len(numbers))
        for module in modules
        for slots in (module._parameters, module._buffers)
        for tensor in slots.values()
        if tensor is not None
    )


def _literal(value: object) -> list[Literal]:
    """A one-element list with the value as plain data, or none where it is not a setting."""
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum)):
        return [value]
    if isinstance(value, (torch.dtype, torch.device, enum.Enum)):
        return [str(value)]
    if isinstance(value, (tuple, list)):
        items = [_literal(item) for item in value]
        return [tuple(item[0] for item in items)] if all(items) else []
    if isinstance(value, (set, frozenset)):
        return _literal(tuple(sorted(value, key=repr)))
    if isinstance(value, dict):
        return _literal(tuple(value.items()))
    if isinstance(value, slice):
        return _literal((value.start, value.stop, value.step))
    if isinstance(value, functools.partial):
        return _literal((value.func, value.args, tuple(value.keywords.items())))
    if callable(value) and hasattr(value, "__qualname__"):
        return [f"{getattr(value, '__module__', '')}.{value.__qualname__}"]
    return []
