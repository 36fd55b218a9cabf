"""Look at every torch module of the process at once: torch's global hooks, and the way in which it calls a module."""

from __future__ import annotations

from types import CodeType
from typing import Any

import torch

from ..torch_facts.private_names import (
    global_backward_hooks,
    global_backward_pre_hooks,
    global_forward_hooks,
    global_forward_pre_hooks,
)
from .authors import is_written_in

_HOOKS = (global_forward_hooks, global_forward_pre_hooks, global_backward_hooks, global_backward_pre_hooks)
# What runs around each forward, and finds each part of a module. A torch may lack the second.
_CALLING = tuple(
    name for name in ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__") if hasattr(torch.nn.Module, name)
)

_torchs: dict[str, tuple[Any, CodeType]] = {}  # functions that proved to be torch's own, with their code


def foreign_on_every_module() -> str:
    """Describe in the end of a sentence what another pack did to all modules; empty if nothing. Takes a microsecond."""
    for hooks in _HOOKS:
        if hooks:
            return "registered a hook on every module"
    for name in _CALLING:
        function = getattr(torch.nn.Module, name)
        known = _torchs.get(name)
        if known is not None and function is known[0] and function.__code__ is known[1]:
            continue
        if not hasattr(function, "__code__") or not is_written_in(function):
            return f"replaced torch.nn.Module.{name}"
        _torchs[name] = function, function.__code__
    return ""
