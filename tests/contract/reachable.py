"""The objects that something keeps alive."""

from __future__ import annotations

import gc
import types
from typing import Any

_EVERYWHERE = (type, types.ModuleType, types.FrameType)  # what they refer to lives as long as the process


def reachable(*roots: Any) -> list[Any]:
    """Everything that these objects keep alive: of functions, what they close over and their defaults."""
    found: dict[int, Any] = {}
    waiting = list(roots)
    while waiting:
        each = waiting.pop()
        if id(each) in found or isinstance(each, _EVERYWHERE):
            continue
        found[id(each)] = each
        if isinstance(each, types.FunctionType):
            waiting += [each.__closure__, each.__defaults__, each.__kwdefaults__, each.__dict__]
        else:
            waiting += gc.get_referents(each)
    return list(found.values())
