"""The structure of a module: everything but its weights' values that a trace of it can depend on.

Two modules of equal structure run the same artifact. Too fine a structure costs a compile; too coarse a one costs a
wrong picture, so every plain attribute counts unless it is known not to matter.
"""

from __future__ import annotations

import enum
import functools

import torch

from .keys import Literal, digest

# Attributes that move without changing the computation: bookkeeping of torch and of ComfyUI's weight loading.
# `comfy_cast_weights` does matter; its effective value is part of the region key, where the weights are read.
_VOLATILE = frozenset(vars(torch.nn.Module())) | {
    "comfy_cast_weights",
    "prev_comfy_cast_weights",
    "comfy_patched_weights",
    "weight_function",
    "bias_function",
    "seed_key",
}


def structure_digest(module: torch.nn.Module) -> str:
    """A digest of classes, weights, their ties and the settings of `module` and everything below it."""
    modules = tuple(_describe(path, submodule) for path, submodule in module.named_modules())
    return digest((_ties(module), *modules))


def settings(module: torch.nn.Module) -> tuple[tuple[str, Literal], ...]:
    """The plain attributes of one module, by name, in the order in which they were set."""
    return tuple(
        (name, literal) for name, value in vars(module).items() if name not in _VOLATILE for literal in _literal(value)
    )


def _ties(module: torch.nn.Module) -> Literal:
    """Which weights are one and the same tensor."""
    numbers: dict[int, int] = {}
    return tuple(
        numbers.setdefault(id(tensor), len(numbers))
        for submodule in module.modules()
        for slots in (submodule._parameters, submodule._buffers)
        for tensor in slots.values()
        if tensor is not None
    )


def _describe(path: str, module: torch.nn.Module) -> Literal:
    kind = type(module)
    weights: tuple[Literal, ...] = tuple(
        (name, tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype), type(tensor).__name__)
        for slots in (module._parameters, module._buffers)
        for name, tensor in slots.items()
        if tensor is not None
    )
    # Somebody's function runs before or after this module: never the same as any other module.
    hooks = tuple(id(hook) for hooks in (module._forward_hooks, module._forward_pre_hooks) for hook in hooks.values())
    return (path, f"{kind.__module__}.{kind.__qualname__}", weights, tuple(sorted(settings(module))), hooks)


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
