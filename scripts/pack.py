"""Imports the pack's modules without ComfyUI, and without torch if the module does not need it."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from .places import ROOT

_NAME = "resolute_without_comfyui"
# Packages whose __init__ is not run, because it needs ComfyUI.
_EMPTY = ("", "compile_cache", "nodes", "nodes.adapters", "nodes.adapters.deepcache", "nodes.adapters.warm_up")


def module(name: str) -> Any:
    """Import a module, for example `module("nodes.adapters.warm_up.workflow")`. Calls share modules until `forget`."""
    if _NAME not in sys.modules:
        for empty in _EMPTY:
            package = ModuleType(".".join(filter(None, (_NAME, empty))))
            package.__path__ = [str(ROOT.joinpath(*empty.split(".")))]
            sys.modules[package.__name__] = package
    return importlib.import_module(f"{_NAME}.{name}")


def forget() -> None:
    """Drop all modules that `module` imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == _NAME]:
        del sys.modules[name]
