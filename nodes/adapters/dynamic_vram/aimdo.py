"""ComfyUI's DynamicVRAM (comfy-aimdo): weights at fixed virtual addresses, whose memory pages are mapped and evicted.

`ModelPatcherDynamic.load` gives each module with more than 16 KiB of weights an allocation `_v` = (reservation,
address, bytes) of the model's `ModelVBAR`, kept for the life of the model. `fault` maps the pages of a range and pins
them; a page that was mapped again has a new serial number. `cast_bias_weight` fills a module's allocation with its
weights, cast and with LoRAs applied, if the serial numbers differ from those of the last fill (`_v_signature`); a load
with other LoRAs sets these to None. Each load copies smaller weights and buffers to the device again, in the dtype of
their file.

Only this file and `page_loading` know DynamicVRAM. Nothing here locks; the callers hold the cache's lock.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import comfy.cli_args
import comfy.model_management
import torch

from ....compile_cache.modules.slots import Slot, swapped, tensor_slots

Serials = tuple[int, ...]  # of the pages of a range, in order

NAMES = ("weight", "bias")
_AIMDO_HEADROOM = 256 << 20
_ALIGNMENT = 512  # bytes, of an allocation


def allocation(module: torch.nn.Module) -> tuple[Any, int, int] | None:
    """(reservation, address, bytes) of a module whose weights are paged, else None."""
    found: tuple[Any, int, int] | None = module.__dict__.get("_v")
    return found


def paged_bytes(module: torch.nn.Module) -> int:
    """Bytes of a paged module's allocation."""
    found: int = module.__dict__["_v"][2]
    return found


def headroom() -> int:
    """Bytes that DynamicVRAM keeps free on a device: an allocation that would leave less evicts pages. 0 if it is off.

    The sum of comfy-aimdo's constant (VRAM_HEADROOM in its `plat.h`) and `--vram-headroom`.
    """
    try:
        memory_management = importlib.import_module("comfy.memory_management")
    except ImportError:  # ComfyUI 0.8.0
        return 0
    if not memory_management.aimdo_enabled:
        return 0
    return _AIMDO_HEADROOM + int(vars(comfy.cli_args.args).get("vram_headroom", 0) * (1 << 30))


def resident_bytes(device: str) -> int:
    """Bytes on a device ("cuda:0") in the resident pages of all loaded models. ComfyUI can evict these pages."""
    return sum(int(reservation.loaded_size()) for reservation in _reservations(torch.device(device)))


def _reservations(device: torch.device) -> list[Any]:
    found: dict[int, Any] = {}
    for loaded in comfy.model_management.current_loaded_models:
        model = getattr(loaded.model, "model", None)  # the patcher may be gone
        reservation = getattr(model, "dynamic_vbars", {}).get(device)
        if reservation is not None:
            found[id(reservation)] = reservation
    return list(found.values())


def page_bytes(reservation: Any) -> int:
    """Bytes of a page. At least one page of the reservation must be resident."""
    resident: int = sum(flags & 1 for flags in reservation.get_residency())
    loaded: int = reservation.loaded_size()
    return loaded // resident


def offset(reservation: Any, address: int) -> int:
    """Bytes from the start of the reservation."""
    start: int = reservation.base_addr
    return address - start


def fault(reservation: Any, address: int, size: int) -> Serials | None:
    """Map the pages of a range, and pin them until the reservation's `unpin` of the range. Returns their serials, or
    None, with nothing pinned, if there is no room for all of them.

    To make room it evicts pages of less recently used models, and waits for the GPU to do so.
    """
    try:
        serials = reservation.fault(address, size)
    except RuntimeError:  # "Fault failed": the driver could not map a page
        return None
    return None if serials is None else tuple(serials)


def has_ranges_of_blocks(modules: Iterable[torch.nn.Module]) -> bool:
    """Core faults in the pages of a block as one range, which starts at the address of its first module.

    ComfyUI 0.33 does so for text encoders, later versions for diffusion models.
    The modules must then keep their addresses: core would not notice the eviction of a page outside the range, and
    would replay its own CUDA graph of the block over it.
    """
    return bool([module for module in modules if "_v_block" in module.__dict__])


def reassign_addresses(modules: Sequence[torch.nn.Module]) -> bool:
    """Give the paged modules of one reservation new addresses, in this order from its start.

    All its pages are evicted, and faulted in again on demand. Returns False, with all addresses unchanged, if the
    reservation has other allocations, if a page is pinned, or if core has prefetched a module.
    """
    found: list[tuple[Any, int, int]] = [module.__dict__["_v"] for module in modules]
    if not found:
        return False
    reservation = found[0][0]
    if any(each[0] is not reservation for each in found) or any("_prefetch" in each.__dict__ for each in modules):
        return False
    places = sorted((address - reservation.base_addr, size) for _, address, size in found)
    ends = [0, *(start + size for start, size in places)]
    starts = [*(start for start, _ in places), reservation.offset]
    if any(not 0 <= start - end < _ALIGNMENT for start, end in zip(starts, ends, strict=True)):
        return False
    if any(flags & 2 for flags in reservation.get_residency()):
        return False
    reservation.free_memory(reservation.loaded_size())  # it waits for the GPU
    if reservation.loaded_size():
        return False
    reservation.offset = 0
    for module, (_, _, size) in zip(modules, found, strict=True):
        own = module.__dict__
        own["_v"] = reservation.alloc(size)
        own["_v_signature"] = None
        for name in NAMES:
            own.pop(f"_v_{name}", None)
    reservation.prioritize()
    return True


def filled(module: torch.nn.Module) -> Serials | None:
    """The serials of the pages that the module's weights were last filled into; None if they must be filled."""
    signature = module.__dict__.get("_v_signature")
    return None if signature is None else tuple(signature)


def views(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The filled weights at their fixed addresses, as (parameter name, tensor)."""
    own = module.__dict__
    return [(name, own[f"_v_{name}"]) for name in NAMES if own.get(f"_v_{name}") is not None]


def as_weight(view: torch.Tensor) -> torch.Tensor:
    """A view of loaded memory as a module's weight: a Parameter, unless the view is quantized."""
    return torch.nn.Parameter(view, requires_grad=False) if type(view) is torch.Tensor else view


class _FullReservation:
    """Replaces a reservation, and never has room for a page."""

    def fault(self, address: int, size: int) -> None:
        return None


def without_page_faults(modules: Iterable[torch.nn.Module]) -> AbstractContextManager[None]:
    """Inside the `with`, loading these paged modules maps no page: core streams other weights through a buffer."""
    paged = [(module, at) for module in modules if (at := allocation(module)) is not None]
    residency = {id(at[0]): at[0].get_residency() for _, at in paged}  # once: a large card has thousands of pages
    return swapped(
        (module.__dict__, "_v", (_FullReservation(), *at[1:]))
        for module, at in paged
        if not _is_resident(residency[id(at[0])], *at)
    )


def _is_resident(residency: Sequence[int], reservation: Any, address: int, size: int) -> bool:
    resident = sum(flags & 1 for flags in residency)
    if not resident:
        return False
    page, start = reservation.loaded_size() // resident, offset(reservation, address)
    return all(flags & 1 for flags in residency[start // page : -(-(start + size) // page)])


def declared_dtype(module: torch.nn.Module) -> torch.dtype | None:
    """The dtype that the model declares for a paged module's weights; None if unknown. The file's may differ."""
    weight = module._parameters.get("weight")
    declared = getattr(weight, "_model_dtype", None) or module.__dict__.get("weight_comfy_model_dtype")
    return declared or getattr(weight, "dtype", None)


def declared_in_float32(modules: Sequence[torch.nn.Module]) -> set[int]:
    """The ids of the modules declared in float32; empty if most are: it is then the weights' dtype, not the inputs'."""
    declared = [declared_dtype(module) for module in modules]
    if 2 * declared.count(torch.float32) > len(declared):
        return set()
    return {id(module) for module, dtype in zip(modules, declared, strict=True) if dtype is torch.float32}


def slots_outside_pages(modules: Sequence[torch.nn.Module]) -> list[Slot]:
    """The slots of all weights and buffers of these modules that are in no allocation."""
    others = [(own, name) for own, name in tensor_slots(*paged(modules)) if name not in NAMES]
    return tensor_slots(*[module for module in modules if "_v" not in module.__dict__]) + others


def paged(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """The modules whose weights are paged."""
    return [module for module in modules if "_v" in module.__dict__]
