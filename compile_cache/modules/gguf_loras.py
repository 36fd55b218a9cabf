"""LoRAs on weights of GGUF files, as inputs of a region.

The packs add the LoRAs of a weight to its decoded numbers in each call: `strength * alpha / rank * up @ down` for each.
Here all LoRAs of a weight are one pair of matrices, whose product a trace adds to the numbers. Its rank is a dynamic
dimension, so other LoRAs, other strengths and several at once share one compile.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import BypassCode, BypassReason, first_line
from ..torch_compat.out_of_memory import is_out_of_memory
from .gguf_weights import GGUFForm, is_gguf_class, patches_of
from .site import Dims, RegionSite
from .slots import Slot, swapped, tensor_slots
from .structure import parts
from .weight_parts import form_of

logger = logging.getLogger(__name__)

_LORAS = "comfy.weight_adapter.lora"  # core's module
_RANKS = 16  # ranks are padded to a multiple of this: products read aligned rows
_NO_ROOM = "there is no memory for its LoRAs beside the model"
_RESERVE = 1 << 30  # bytes of the device that must stay free, for a step's workspace

Pair = tuple[torch.Tensor, torch.Tensor]  # (out, rank) with the strengths in it, and (rank, in), both in float32


@dataclass(frozen=True, slots=True)
class _Kept:
    """patches: the source of the pair, or of the reason why there is none; kept, so that no other object has its id."""

    patches: tuple[Any, ...]
    device: torch.device
    found: Pair | str

    def is_of(self, patches: tuple[Any, ...], device: torch.device) -> bool:
        return device == self.device and len(patches) == len(self.patches) and all(map(_same, patches, self.patches))


_kept: Any = WeakIdKeyDictionary()  # by weight


def pair_of(weight: Any) -> Pair | str | None:
    """Return the LoRAs of a weight as one pair on its device; None if it has none; a text for users if no pair is made.

    The pair is made once, and freed with the weight, or when a later call sees that the weight has other LoRAs or none.
    """
    groups = patches_of(weight)
    if not groups:
        if len(_kept):
            _kept.pop(weight, None)
        return None
    patches = tuple([each for group, _ in groups for each in group])
    known: _Kept | None = _kept.get(weight)
    if known is None or not known.is_of(patches, weight.device):
        _kept.pop(weight, None)  # before the new one takes memory
        known = _kept[weight] = _Kept(patches, weight.device, _made(patches, weight))
    return known.found


def forget(weights: Iterable[torch.Tensor]) -> None:
    """Free the pairs of these weights: ComfyUI unloaded the weights, and no call uses their pairs until a reload."""
    for weight in weights:
        _kept.pop(weight, None)


def free_after_oom(weights: Iterable[torch.Tensor]) -> bool:
    """Free the pairs of these weights, because a call ran out of memory beside them. None is made until the weights are
    reloaded or have other LoRAs. Returns True if there was one.
    """
    had = [(weight, known) for weight in weights if (known := _kept.get(weight)) and isinstance(known.found, tuple)]
    for weight, known in had:
        _kept[weight] = replace(known, found=_NO_ROOM)
    return bool(had)


class LoraInputs:
    """The LoRAs of a site's GGUF weights, as further inputs of the site."""

    def __init__(self, site: RegionSite, slots: Sequence[Slot]) -> None:
        """slots: of the site's weights."""
        self._slots = [slot for slot in slots if _is_packed(slot[0][slot[1]])]
        names = [f"lora{number}" for number in range(len(self._slots))]
        dims: list[Dims] = [each for name in names for each in ((None, name), (name, None))]
        function = _adding(site.function, _places(site.module, self._slots), site.without)
        self._plain = site
        self._site = replace(site, function=function, dims=(*site.dims, *dims))
        self._zeros: dict[tuple[int, torch.device], Pair] = {}

    def added_to(self, tensors: list[torch.Tensor]) -> tuple[RegionSite, list[torch.Tensor], BypassReason | None]:
        """Return the site and its inputs for a call with these tensors; also the reason if no region supports a LoRA.

        If one weight has a LoRA, the others get one of zeros, so that all LoRAs of a block share its code.
        """
        weights = [own[name] for own, name in self._slots]
        elsewhere = [weight for weight in weights if weight.device != tensors[0].device]
        if elsewhere:  # low VRAM: no region supports them
            forget(elsewhere)
            return self._plain, tensors, None
        pairs = [pair_of(weight) for weight in weights]
        if not any(pairs):
            return self._plain, tensors, None
        found = list(tensors)
        for number, (weight, pair) in enumerate(zip(weights, pairs, strict=True)):
            if isinstance(pair, str):
                detail = f"a GGUF weight is patched in each call: {pair}; blocks with such weights run eagerly"
                return self._plain, tensors, BypassReason(BypassCode.UNREADABLE_WEIGHTS, detail)
            key = (number, weight.device)
            if pair is None and key not in self._zeros:
                self._zeros[key] = _zeros(weight)
            found += pair or self._zeros[key]
        return self._site, found, None


def _is_packed(weight: Any) -> bool:
    form = form_of(weight)
    return isinstance(form, GGUFForm) and bool(form.layout)


def _places(module: torch.nn.Module, slots: Sequence[Slot]) -> list[tuple[str, str]]:
    """Return the places of these weights in the module: the name of a submodule, and the name in it."""
    found = parts(module) if slots else ()
    names = {id(own): place for place, part in found for own in (part._parameters, part._buffers)}
    return [(names[id(own)], name) for own, name in slots]


def _adding(
    function: Callable[..., Any], places: Sequence[tuple[str, str]], without: Sequence[str]
) -> Callable[..., Any]:
    """Return the function of a site with pairs as its last inputs. Untraced, its layers add the LoRAs themselves.

    It references no module, because it is kept with copies of modules.
    """

    def run(module: torch.nn.Module, *tensors: torch.Tensor) -> Any:
        first = len(tensors) - 2 * len(places)
        own, pairs = tensors[:first], tensors[first:]
        changed: dict[int, torch.Tensor] = {}
        for (place, name), up, down in zip(places, pairs[::2], pairs[1::2], strict=True):
            numbers = getattr(module.get_submodule(place), name)
            if not is_gguf_class(type(numbers)):  # decoded, in a trace
                changed[id(numbers)] = numbers + (up @ down).reshape(numbers.shape)
        every = [slot for _, part in parts(module, without) for slot in tensor_slots(part)] if changed else []
        with swapped([(*slot, new) for slot in every if (new := changed.get(id(slot[0][slot[1]]))) is not None]):
            return function(module, *own)

    return run


def _same(one: Any, other: Any) -> bool:
    """Compare two patches. A patch is (strength, adapter, strength of the weight, place in it, function)."""
    return bool(one[1] is other[1] and (one[0], *one[2:]) == (other[0], *other[2:]))


def _made(patches: Sequence[Any], weight: Any) -> Pair | str:
    try:
        return _joined([_of_patch(patch, weight.shape) for patch in patches], weight)
    except ValueError as error:
        return str(error)
    except Exception as error:
        if is_out_of_memory(error):
            return _NO_ROOM
        logger.debug("Resolute: a LoRA cannot be read", exc_info=True)
        return f"its LoRA cannot be read: {first_line(error)}"


class _Lora(NamedTuple):
    """One LoRA of a weight: factor * up @ down, added to these rows and columns."""

    up: torch.Tensor
    down: torch.Tensor
    factor: float
    rows: slice
    columns: slice


def _of_patch(patch: Any, shape: torch.Size) -> _Lora:
    """Raises ValueError for a patch that is no plain LoRA."""
    strength, adapter, of_weight, place, function = patch
    lora = getattr(sys.modules.get(_LORAS), "LoRAAdapter", None)
    if type(adapter) is not lora or len(adapter.weights) != 6:
        raise ValueError(f"{getattr(adapter, 'name', 'a difference')} is no plain LoRA")
    up, down, alpha, *others = adapter.weights
    if any(each is not None for each in others):
        raise ValueError("its LoRA is weight-decomposed (DoRA), has a middle part, or another shape")
    if of_weight != 1.0 or function is not None:
        raise ValueError("a node scales the weight itself, or what is added to it")
    rows, columns = slice(0, shape[0]), slice(0, shape[1:].numel())
    if place is not None:
        dimension, start, length = place
        if dimension not in (0, 1) or len(shape) != 2:
            raise ValueError("its LoRA belongs to a part of the weight")
        part = slice(start, start + length)
        rows, columns = (part, columns) if dimension == 0 else (rows, part)
    up, down = up.flatten(1), down.flatten(1)
    fits = up.shape == (rows.stop - rows.start, down.shape[0]) and down.shape[1] == columns.stop - columns.start
    if not fits:
        raise ValueError("its LoRA has another shape")
    factor = strength * (1.0 if alpha is None else float(alpha) / down.shape[0])
    return _Lora(up, down, factor, rows, columns)


def _joined(loras: Sequence[_Lora], weight: Any) -> Pair:
    """Raises ValueError if the device has too little memory."""
    rank = sum(lora.down.shape[0] for lora in loras)
    if not has_room(weight.device, 4 * (rank + _RANKS) * (weight.shape[0] + weight.shape[1:].numel())):
        raise ValueError(_NO_ROOM)
    up, down = _zeros(weight, rank)
    at = 0
    for lora in loras:
        ranks = slice(at, at := at + lora.down.shape[0])
        up[lora.rows, ranks] = lora.up.to(weight.device, torch.float32) * lora.factor
        down[ranks, lora.columns] = lora.down.to(weight.device, torch.float32)
    return up, down


def _zeros(weight: Any, rank: int = 1) -> Pair:
    rank, shape = -(-rank // _RANKS) * _RANKS, weight.shape
    sizes = ((shape[0], rank), (rank, shape[1:].numel()))
    up, down = (torch.zeros(size, device=weight.device) for size in sizes)
    return up, down


def has_room(device: torch.device, size: int) -> bool:
    """True if the device has `size` bytes left beside a step's workspace."""
    if device.type != "cuda":
        return True
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused >= size + _RESERVE
