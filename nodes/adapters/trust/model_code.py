"""Judge the code of a whole model: core's own, another pack's, or core's with a function of another pack in it."""

from __future__ import annotations

import sys
from collections.abc import Collection

import torch

from ....compile_cache.code_identity.functions import string_constants
from ....compile_cache.code_identity.reach import CodeReach, ReachCache
from ....compile_cache.errors import BypassCode, BypassReason
from ..comfyui.transformer_options import Meaning, names_of
from .trust import why_foreign

# Functions of these modules, and these functions, move memory, choose devices, read files and show progress. Packs
# replace some of them for their own memory management, and core sets callbacks there for each prompt. Neither changes
# the results of a model: `cast_modules_with_vbar` fills pages with the weights that a call would have cast.
MANAGEMENT_MODULES = frozenset(
    {
        "comfy.memory_management", "comfy.model_management", "comfy.model_prefetch",
        "comfy.ops.cast_modules_with_vbar", "comfy.ops.resolve_cast_module_with_vbar", "comfy.pinned_memory",
        "comfy.utils.DISABLE_MMAP", "comfy.utils.MMAP_TORCH_FILES", "comfy.utils.PROGRESS_BAR_ENABLED",
        "comfy.utils.PROGRESS_BAR_HOOK", "comfy.utils.PROGRESS_THROTTLE_MIN_INTERVAL",
        "comfy.utils.PROGRESS_THROTTLE_MIN_PERCENT", "comfy.utils.ProgressBar", "comfy.utils.load_safetensors",
        "comfy.utils.load_torch_file", "comfy.utils.model_trange", "comfy.utils.trange", "comfy_aimdo.host_buffer",
        "comfy_aimdo.model_vbar", "comfy_aimdo.torch", "comfy_aimdo.vram_buffer", "logging", "psutil",
    }
)  # fmt: skip
_NOISE_LEVELS = names_of(Meaning.NOISE_LEVEL)  # core's HunyuanVideo with mean flow reads one

REPLACED_CODE = BypassReason(
    BypassCode.REPLACED_FORWARD,
    "another pack put code of its own into the model, and a capture would repeat what that code did once",
)


def unkeyed_input(what: str) -> BypassReason:
    """Why a forward must not be captured: it reads a value that is in no key. what: the value's name and class."""
    return BypassReason(BypassCode.OBSERVED_INPUT, f"{what}, which is no input of a graph")


# Core imports these modules when it starts, and models of all kinds share code with the models in them.
_COMMON = (
    "comfy.ldm.models.autoencoder", "comfy.ldm.modules.attention", "comfy.ldm.modules.diffusionmodules.model",
    "comfy.ldm.modules.diffusionmodules.openaimodel", "comfy.ops",
)  # fmt: skip


def read_ahead() -> None:
    """Compute the reach of common models' code in advance, so that no prompt waits for it."""
    inside = [(name, each) for name in _COMMON for each in list(vars(sys.modules.get(name, object)).values())]
    kinds = {each for name, each in inside if isinstance(each, type) and each.__module__ == name}
    reaches().of(each for each in kinds if issubclass(each, torch.nn.Module))


def reaches() -> ReachCache:
    """A cache of the code that models can reach. A query takes a tenth of a millisecond while no code was replaced."""
    return ReachCache(MANAGEMENT_MODULES)


def blocker(kinds: frozenset[type], reach: CodeReach, trusted: Collection[str]) -> BypassReason | None:
    """Why a forward of modules of these classes must not be captured, or None.

    trusted: see `trust.why_foreign`.
    """
    if reach.foreign:
        return BypassReason(
            BypassCode.REPLACED_FORWARD,
            f"another pack replaced {reach.foreign[0]}, and a capture would repeat what that did once",
        )
    if reach.unknown:
        return unkeyed_input(reach.unknown)
    foreign = why_foreign(kinds, trusted)
    if foreign is not None:
        text = f"the model is not captured, because its code may count its calls: {foreign}"
        return BypassReason(BypassCode.FOREIGN_MODEL, text)
    if not _NOISE_LEVELS.isdisjoint(string_constants(kinds)):
        return BypassReason(
            BypassCode.OBSERVED_INPUT, "the model reads the noise level of a step from transformer_options"
        )
    return None
