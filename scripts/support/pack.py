"""Modules of the pack, imported without ComfyUI and, where they do not need it themselves, without torch."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from .places import ROOT

_NAME = "resolute_without_comfyui"
# Packages whose own code is left out: it wants ComfyUI.
_EMPTY = ("", "compile_cache", "nodes", "nodes.adapters", "nodes.adapters.deepcache", "nodes.adapters.warm_up")


def module(name: str) -> Any:
    """`module("nodes.adapters.scan.workflow")`. Modules are shared until `forget`."""
    if _NAME not in sys.modules:
        for empty in _EMPTY:
            package = ModuleType(".".join(filter(None, (_NAME, empty))))
            package.__path__ = [str(ROOT.joinpath(*empty.split(".")))]
            sys.modules[package.__name__] = package
    return importlib.import_module(f"{_NAME}.{name}")


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == _NAME]:
        del sys.modules[name]
