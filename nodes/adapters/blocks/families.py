"""The table of model families, and the hooks of a model: which of its blocks become regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ....compile_cache.errors import BypassCode, BypassReason
from ....compile_cache.keys import VAE_ROLES, Role
from ....compile_cache.regions.site import Bypass, Hook, RegionRunner
from ..comfyui import chosen_attention, version
from ..foreign.trust import trusted_hooks
from . import decoder, encoder
from .transformers import recognise
from .unets import unet
from .videos import encoders, known


class HookProvider(NamedTuple):
    """hooks: (module, run, bypass) -> the hooks of its blocks; empty for a model of another family."""

    hooks: Callable[[torch.nn.Module, RegionRunner, Bypass], list[Hook]]
    roles: tuple[Role, ...]


# One line for each kind of hooks: `recognise` covers most families.
PROVIDERS = (
    HookProvider(unet.hooks, (Role.UNET, Role.CONTROLNET)),
    HookProvider(recognise.hooks, (Role.UNET, Role.CONTROLNET)),
    HookProvider(decoder.hooks, (Role.VAE_DECODE,)),
    HookProvider(encoder.hooks, (Role.VAE_ENCODE,)),
    HookProvider(known.hooks, (Role.VAE_DECODE,)),
    HookProvider(encoders.hooks, (Role.VAE_ENCODE,)),
)

_OPAQUE_ATTENTION = BypassReason(
    BypassCode.PATCHED_BLOCK,
    "ComfyUI computes attention by kernels that a trace cannot follow (SageAttention, FlashAttention or xFormers); "
    "transformer blocks run as they are",
)


def hooks_of(module: torch.nn.Module, role: Role, run: RegionRunner, bypass: Bypass) -> list[Hook]:
    """The hooks of a module in a role. A block with a part that another pack wrote has none, and a bypass; nor has a
    block with attention that cannot be traced, or that the model's file chose.
    """
    traceable = version.attention_is_traceable() if unet.is_unet(module) else chosen_attention.default() is not None
    if role not in VAE_ROLES and not traceable:
        bypass(_OPAQUE_ATTENTION)
    found = [hook for each in PROVIDERS if role in each.roles for hook in each.hooks(module, run, bypass)]
    return [hook for hook in trusted_hooks(found, bypass) if not _has_own_attention(hook, bypass)]


def _has_own_attention(hook: Hook, bypass: Bypass) -> bool:
    name = chosen_attention.of_file(hook.module)
    if name:
        kind = hook.labels[0][0].partition(".")[0]
        text = f"the model's file chooses the attention of {kind} blocks ({name}); they run as they are"
        bypass(BypassReason(BypassCode.PATCHED_BLOCK, text))
    return bool(name)
