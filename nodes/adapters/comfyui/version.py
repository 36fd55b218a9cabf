"""Differences between ComfyUI's versions. No other file checks the version."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import comfy.model_management


def with_node_id() -> dict[str, Any]:
    """The arguments of io.Schema for a node that needs its own id, because it shows texts while other nodes run.

    Without `not_idempotent`, ComfyUI reuses the output of a node with equal inputs and another id, such as one of the
    previous workflow, and the texts go to that id.
    """
    from comfy_api.latest import io

    return {"hidden": [io.Hidden.unique_id], "not_idempotent": True}


def search_aliases(*words: str) -> dict[str, Any]:
    """The schema argument for words, besides a node's name, by which ComfyUI's search finds it (absent in 0.8)."""
    return _if_known("search_aliases", list(words))


def shows_cached_text() -> dict[str, Any]:
    """The schema argument for a node that shows a text but is no output node: ComfyUI then sends the text again when it
    skips the node (absent in 0.8).
    """
    return _if_known("has_intermediate_output", True)


def hidden_from_search() -> dict[str, Any]:
    """The schema argument for a node that only our own prompts contain (absent in 0.8)."""
    return _if_known("is_dev_only", True)


def _if_known(argument: str, value: Any) -> dict[str, Any]:
    """An argument of io.Schema; empty if this version lacks it."""
    from comfy_api.latest import io  # only node classes need it; the rest of this file works without a server

    return {argument: value} if argument in inspect.signature(io.Schema).parameters else {}


def is_dynamic(patcher: Any) -> bool:
    """The patcher pages its weights (DynamicVRAM, absent in 0.8)."""
    return bool(getattr(patcher, "is_dynamic", lambda: False)())


def of_comfyui() -> str:
    """The number of this ComfyUI's version."""
    try:
        return importlib.import_module("comfyui_version").__version__  # type: ignore[no-any-return]
    except (ImportError, AttributeError):
        return "of an unknown version"


def of_this_pack() -> str:
    """The number in pyproject.toml, which every install has."""
    text = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text("utf-8")
    found = re.search(r'^version = "([^"]+)"', text, re.MULTILINE)
    return found[1] if found else "of an unknown version"


def file_of(patcher: Any) -> str:
    """The name of the file that a model was loaded from, if core's loader recorded it; otherwise empty."""
    noted = getattr(patcher, "cached_patcher_init", None)
    given = noted[1] if isinstance(noted, tuple) and len(noted) > 1 else ()
    return next((Path(each).name for each in given if isinstance(each, str) and each), "")


def vae_attention_is_traceable() -> bool:
    """The VAE's attention is torch's. Other attentions slice by free memory, and a trace would freeze the slices."""
    return bool(comfy.model_management.pytorch_attention_enabled_vae())
