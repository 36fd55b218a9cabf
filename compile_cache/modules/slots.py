"""Replace entries of modules' dictionaries (weights, parts, a forward) temporarily, and restore them afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# An entry of a module: its `_parameters`, `_buffers`, `_modules` or `__dict__`, and the name in it.
Slot = tuple[dict[str, Any], str]

_ABSENT = object()


@contextmanager
def swapped(values: Iterable[tuple[dict[Any, Any], Any, Any]]) -> Iterator[None]:
    """Inside, each slot (dictionary, name) has the value of its triple.

    At the end, and after any error, each slot is restored; a name that was absent is removed. This drops values that
    the body itself assigned to these slots; only slots that are not named here keep the body's values. If a slot is
    named twice, the later value counts. Swaps may nest.
    """
    values = list(values)
    before = [(own, name, own.get(name, _ABSENT)) for own, name, _ in values]
    try:
        for own, name, value in values:
            own[name] = value
        yield
    finally:
        for own, name, value in before:
            if value is _ABSENT:
                own.pop(name, None)
            else:
                own[name] = value


def tensor_slots(*modules: torch.nn.Module) -> list[Slot]:
    """Return the slots of each module's own parameters, then of its buffers. Submodules are left out."""
    return [
        (own, name)
        for module in modules
        for own in (module._parameters, module._buffers)
        if own
        for name, tensor in own.items()
        if tensor is not None
    ]


def all_parts(module: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """Return `module` and all modules below it, each once with its name, in the order of `named_modules`.

    That generator passes each module through all levels: 17,000 steps for the 2,034 modules of SDXL's UNet.
    """
    found: dict[torch.nn.Module, str] = {}
    waiting = [("", module)]
    while waiting:
        name, part = waiting[-1]
        del waiting[-1]
        if part in found:
            continue
        found[part] = name
        if part._modules:
            prefix = f"{name}." if name else ""
            waiting += [(prefix + own, child) for own, child in reversed(part._modules.items()) if child is not None]
    return found
