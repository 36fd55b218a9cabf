"""The structure of a module: everything but its weights' values that a trace of it can depend on.

Two modules of equal structure run the same artifact. Too fine a structure costs a compile; too coarse a one costs a
wrong picture, so every plain attribute counts unless it is known not to matter.
"""

from __future__ import annotations

import torch

from ...keys import Literal, digest

# Attributes that move without changing the computation: bookkeeping of torch and of ComfyUI's weight loading.
# `comfy_cast_weights` does matter; its effective value is part of the region key where the weights are read.
_VOLATILE = frozenset(
    {"training", "comfy_cast_weights", "prev_comfy_cast_weights", "seed_key", "comfy_patched_weights"}
)


def structure_digest(module: torch.nn.Module) -> str:
    """A digest of classes, parameters, buffers and plain settings of `module` and everything below it."""
    return digest(tuple(_describe(path, submodule) for path, submodule in module.named_modules()))


def _describe(path: str, module: torch.nn.Module) -> Literal:
    kind = type(module)
    weights: list[Literal] = [
        (name, tuple(tensor.shape), str(tensor.dtype), type(tensor).__name__)
        for slots in (module._parameters, module._buffers)
        for name, tensor in slots.items()
        if tensor is not None
    ]
    settings = [
        (name, literal)
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and name not in _VOLATILE
        for literal in _literal(value)
    ]
    return (path, f"{kind.__module__}.{kind.__qualname__}", tuple(weights), tuple(settings))


def _literal(value: object) -> list[Literal]:
    """A one-element list with the value as plain data, or none where it is not a setting."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return [value]
    if isinstance(value, (torch.dtype, torch.device)):
        return [str(value)]
    if isinstance(value, (tuple, list)):
        items = [_literal(item) for item in value]
        return [tuple(item[0] for item in items)] if all(items) else []
    if callable(value) and hasattr(value, "__qualname__"):
        return [f"{getattr(value, '__module__', '')}.{value.__qualname__}"]
    return []
