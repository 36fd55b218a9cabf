"""Recognised blocks: lists of modules of one class in ComfyUI's own models become regions, for any family.

A family that needs more than its blocks' arguments to be compiled well has a separate file.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .....compile_cache.code_identity.functions import code_of, names_in
from .....compile_cache.keys import repr_digest
from .....compile_cache.modules.site import Bypass, Hook, RegionRunner
from .....compile_cache.modules.slots import all_parts
from .....compile_cache.modules.structure import Memo, structure_digest
from ...comfyui import chosen_attention
from ...comfyui.module_attributes import ATTRIBUTES
from ...trust.core_code import is_plain_layer
from ...trust.trust import why_untrusted
from ..unets.unet import is_unet
from .block_forward import RecognisedBlock
from .catalogue import is_catalogued, variant_of
from .shares import routed_part

# A list with fewer weights than this fraction of the largest list's costs more to compile than it saves.
_SMALLEST_PART = 0.1


def hooks(module: torch.nn.Module, run: RegionRunner, bypass: Bypass) -> list[Hook]:
    """Hooks for the repeated blocks of a transformer; empty for a model without any."""
    if is_unet(module) or chosen_attention.default() is None:
        return []
    structures = _Structures()
    found = []
    for name, block in repeated_blocks(module):
        why = why_untrusted(block)
        if why is not None:
            bypass(why)
            continue
        origin = "catalogued" if is_catalogued(type(block)) else "recognised"
        for path, part in _with_shared_experts(name, block):
            structure = structures.of(part)
            forward = RecognisedBlock(path, part, run, bypass, structure)
            found.append(Hook(part, forward, (), (type(part).__name__, path), origin, structure))
    return found


def _with_shared_experts(name: str, block: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield a block, and the shared experts of its routed part, which process every token."""
    yield name, block
    if routed := routed_part(block):
        for own, part in block.get_submodule(routed).named_children():
            if not isinstance(part, torch.nn.ModuleList) and any(True for _ in part.children()):
                yield f"{name}.{routed}.{own}", part


class _Structures:
    """Digests of blocks. They omit attributes that the blocks' code never reads, such as the number of a layer."""

    def __init__(self) -> None:
        self._memo = Memo()
        self._read: dict[frozenset[type], set[str]] = {}

    def of(self, block: torch.nn.Module) -> str:
        inside = list(all_parts(block))
        kinds = frozenset(map(type, inside))
        if kinds not in self._read:
            self._read[kinds] = names_in(code_of(kinds))
        variant, described = variant_of(block)
        attributes = {name for part in inside for name in part.__dict__}
        ignored = (attributes - self._read[kinds]) | described
        structure = structure_digest(block, self._memo, ignored=frozenset(ignored), policy=ATTRIBUTES)
        return repr_digest((structure, variant))


def repeated_blocks(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the name and module of each element of the largest lists of modules of one class."""
    lists = list(_lists_of_blocks(module, ""))
    weights = [sum(weight.numel() for _, block in blocks for weight in block.parameters()) for blocks in lists]
    for blocks, count in zip(lists, weights, strict=True):
        if count >= _SMALLEST_PART * max(weights):
            yield from blocks


def _lists_of_blocks(module: torch.nn.Module, path: str) -> Iterator[list[tuple[str, torch.nn.Module]]]:
    """The outermost lists of modules of one class."""
    for name, child in module.named_children():
        inside = f"{path}.{name}" if path else name
        if isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict)) and _are_blocks(child):
            yield [(f"{inside}.{number}", block) for number, block in child.named_children()]
        else:
            yield from _lists_of_blocks(child, inside)


def _are_blocks(container: torch.nn.Module) -> bool:
    blocks = list(container.children())
    kinds = set(map(type, blocks))
    if len(kinds) != 1 or not any(True for _ in blocks[0].children()):
        return False
    (kind,) = kinds
    return not is_plain_layer(kind) and (len(blocks) > 1 or is_catalogued(kind))
