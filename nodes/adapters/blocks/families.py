"""The table of model families: which file hooks the blocks of which models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from ....compile_cache.keys import Role
from ....compile_cache.regions.site import Bypass, Hook, RegionRunner
from ..foreign.trust import trusted_hooks
from . import decoder
from .transformers import recognise
from .unets import unet

FamilyHooks = Callable[[torch.nn.Module, RegionRunner, Bypass], list[Hook]]


class Family(NamedTuple):
    hooks: FamilyHooks  # returns an empty list for a model of another family
    roles: tuple[Role, ...]


# One line for each family.
FAMILIES = (
    Family(unet.hooks, (Role.UNET, Role.CONTROLNET)),
    Family(recognise.hooks, (Role.UNET, Role.CONTROLNET)),
    Family(decoder.hooks, (Role.VAE_DECODE,)),
)


def families_for(role: Role) -> list[FamilyHooks]:
    """The `hooks` of every family that serves a role, in the order of the table."""
    return [family.hooks for family in FAMILIES if role in family.roles]


def hooks_of(families: Iterable[FamilyHooks], module: torch.nn.Module, run: RegionRunner, bypass: Bypass) -> list[Hook]:
    """The hooks of a module by these families. A block with a part that another pack wrote has none, and a bypass."""
    return trusted_hooks([hook for hooks in families for hook in hooks(module, run, bypass)], bypass)
