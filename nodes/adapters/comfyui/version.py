"""Differences between ComfyUI's versions. No other file asks which version it runs on."""

from __future__ import annotations

import inspect
from typing import Any

import comfy.model_management

_FORCE_CAST = "comfy_force_cast_weights"  # read for weights in fp8; a module without it counts as False


def with_node_id() -> dict[str, Any]:
    """The arguments of io.Schema for a node that needs its own id, because it shows texts while other nodes run.

    Without `not_idempotent`, ComfyUI reuses the output of a node with equal inputs and another id, as in the workflow
    before, and the texts go to that id.
    """
    from comfy_api.latest import io

    return {"hidden": [io.Hidden.unique_id], "not_idempotent": True}


def search_aliases(*words: str) -> dict[str, Any]:
    """Words by which ComfyUI's search finds a node beside its name, as an argument for its schema (absent in 0.8)."""
    return _if_known("search_aliases", list(words))


def shows_cached_text() -> dict[str, Any]:
    """For a node that is no output node and shows a text: ComfyUI then sends the text again when it skips the node,
    as an argument for its schema (absent in 0.8).
    """
    return _if_known("has_intermediate_output", True)


def _if_known(argument: str, value: Any) -> dict[str, Any]:
    """An argument of io.Schema, where this version has it."""
    from comfy_api.latest import io  # only node classes ask; the rest of this file serves without a server

    return {argument: value} if argument in inspect.signature(io.Schema).parameters else {}


def is_dynamic(patcher: Any) -> bool:
    """The patcher pages its weights (DynamicVRAM, absent in 0.8)."""
    return bool(getattr(patcher, "is_dynamic", lambda: False)())


def attributes_of_a_load(patcher: Any) -> dict[str, Any]:
    """The attributes that `patcher.load` sets on each module with weights, if they change how it computes.

    DynamicVRAM and 0.8 set none.
    """
    code = getattr(type(patcher).load, "__code__", None)
    names = () if code is None else code.co_names
    return {_FORCE_CAST: bool(patcher.force_cast_weights)} if _FORCE_CAST in names else {}


def supports_static_clone(patcher: Any) -> bool:
    """The patcher's `clone` can make one whose weights are not paged."""
    return "disable_dynamic" in inspect.signature(patcher.clone).parameters


def unload_everywhere(patcher: Any) -> None:
    """Unload a model and its clones from every device."""
    unload = comfy.model_management.unload_model_and_clones
    unload(patcher, **({"all_devices": True} if "all_devices" in inspect.signature(unload).parameters else {}))


# The key of `additional_models` under which a patcher keeps copies of its model for other GPUs.
GPU_COPIES = "multigpu"


def attention_is_traceable() -> bool:
    """Core's attention is plain torch. Tracing cannot follow the kernels of SageAttention and others.

    Where another pack replaced it, the blocks that reach it say so themselves (`CodeReach`).
    """
    mm = comfy.model_management
    foreign = (
        "sage_attention_enabled",
        "flash_attention_enabled",
        "xformers_enabled",
        "comfy_kitchen_attention_enabled",
    )
    return not any(getattr(mm, name, lambda: False)() for name in foreign)


def vae_attention_is_traceable() -> bool:
    """The VAE's attention is torch's. The others slice by free memory, and a trace would freeze the slices."""
    return bool(comfy.model_management.pytorch_attention_enabled_vae())
