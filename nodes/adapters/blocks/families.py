"""The hooks of a model: which of its blocks become regions."""

from __future__ import annotations

import torch

from ....compile_cache.errors import BypassCode, BypassReason
from ....compile_cache.keys import VAE_ROLES, Role
from ....compile_cache.regions.site import Bypass, Hook, RegionRunner
from ..comfyui import chosen_attention
from ..foreign.trust import trusted_hooks
from . import vaes
from .transformers import recognise
from .unets import unet


def hooks_of(module: torch.nn.Module, role: Role, run: RegionRunner, bypass: Bypass) -> list[Hook]:
    """The hooks of a module in a role. A block with a part that another pack wrote has none, and a bypass; nor has a
    block with attention that no name of core's has, or that the model's file chose.
    """
    if role in VAE_ROLES:
        coder = vaes.coder_of(module, role)
        found = [] if coder is None else coder.hooks(module, run, bypass)
    else:
        if chosen_attention.default() is None:
            text = f"{chosen_attention.why_unknown({})}; transformer blocks run eagerly"
            bypass(BypassReason(BypassCode.REPLACED_FORWARD, text))
        found = [*unet.hooks(module, run, bypass), *recognise.hooks(module, run, bypass)]
    return [hook for hook in trusted_hooks(found, bypass) if not _has_own_attention(hook, bypass)]


def _has_own_attention(hook: Hook, bypass: Bypass) -> bool:
    name = chosen_attention.of_file(hook.module)
    if name:
        kind = hook.labels[0][0].partition(".")[0]
        text = f"the model's file chooses the attention of {kind} blocks ({name}); they run eagerly"
        bypass(BypassReason(BypassCode.PATCHED_BLOCK, text))
    return bool(name)
