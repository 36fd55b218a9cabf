"""Differences between ComfyUI versions. Nothing else in the pack asks which version it runs on."""

from __future__ import annotations

import inspect
from typing import Any

import comfy.model_management
from comfy.ldm.modules import attention

from ....compile_cache.regions.foreign_code import origin


def is_dynamic(patcher: Any) -> bool:
    """Whether the patcher pages its weights (DynamicVRAM, absent in 0.8)."""
    return bool(getattr(patcher, "is_dynamic", lambda: False)())


def supports_static_clone(patcher: Any) -> bool:
    """Whether `clone` can give a patcher whose weights are not paged."""
    return "disable_dynamic" in inspect.signature(patcher.clone).parameters


def unload_everywhere(patcher: Any) -> None:
    """Take a model and its clones off every device."""
    unload = comfy.model_management.unload_model_and_clones
    unload(patcher, **({"all_devices": True} if "all_devices" in inspect.signature(unload).parameters else {}))


# The name under which a patcher keeps the copies of its model on other GPUs.
GPU_COPIES = "multigpu"


def attention_is_traceable() -> bool:
    """Whether core's attention is plain torch: SageAttention and others bring kernels that tracing cannot see."""
    if origin(attention.optimized_attention) != "comfy":  # another pack exchanged it
        return False
    mm = comfy.model_management
    foreign = (
        "sage_attention_enabled",
        "flash_attention_enabled",
        "xformers_enabled",
        "comfy_kitchen_attention_enabled",
    )
    return not any(getattr(mm, name, lambda: False)() for name in foreign)


def vae_attention_is_traceable() -> bool:
    """Whether the VAE's attention is torch's own; the others slice by free memory, which a trace would freeze."""
    return bool(comfy.model_management.pytorch_attention_enabled_vae())
