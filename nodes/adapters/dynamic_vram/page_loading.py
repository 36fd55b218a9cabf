"""Fill paged weights, and prefetch the weights of a block, by core's own functions, including casts and LoRAs.

`aimdo` explains pages.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import comfy.model_management
import comfy.ops
import torch

from ....compile_cache.packages import version_of
from ..comfyui.quantization import WeightCast, weight_cast
from . import aimdo
from .aimdo import NAMES, as_weight

# The first comfy-aimdo that counts pins. Before it a pin is a flag, so core's unpin of a module would remove ours.
_COUNTS_PINS = (0, 3, 0)
_FUNCTIONS = ("cast_bias_weight", "uncast_bias_weight", "cast_modules_with_vbar", "resolve_cast_module_with_vbar")


@functools.cache
def why_unsupported() -> str | None:
    """Why only core can load paged weights in this process; None if this file can.

    It does not apply to weights that are not paged, as in ComfyUI 0.8.0.
    """
    missing = [name for name in _FUNCTIONS if not hasattr(comfy.ops, name)]
    if missing:
        return f"this ComfyUI pages weights without comfy.ops.{missing[0]}; ComfyUI 0.21.0 has it"
    version = version_of("comfy-aimdo")
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if found is None or tuple(map(int, found.groups())) < _COUNTS_PINS:
        needed = ".".join(map(str, _COUNTS_PINS))
        return f"comfy-aimdo {version or 'of an unknown version'} pages the weights, and {needed} is needed"
    return None


def fill(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Fill a paged module's allocation by core's own function. Its pages must be mapped and pinned.

    dtype: of the module's input.
    """
    device = torch.device("cuda", aimdo.allocation(module)[0].device)  # type: ignore[index]
    weight, bias, stream = comfy.ops.cast_bias_weight(
        module, device=device, offloadable=True, **asdict(weight_cast(module, dtype, device))
    )
    comfy.ops.uncast_bias_weight(module, weight, bias, stream)


LoadedWeights = list[tuple[torch.nn.Module, str, torch.Tensor]]  # (module, name, tensor)


class Resident:
    """Weights that core loaded into pages. While the pages stay mapped, core is not called again: its call costs the
    host 0.15 s a step under cProfile for the 816 modules of SDXL's blocks, beside the copies themselves.

    Not thread-safe. It keeps the modules alive.
    """

    def __init__(self) -> None:
        self._known: dict[torch.nn.Module, tuple[tuple[Any, ...], aimdo.Serials, LoadedWeights]] = {}

    def pinned(self, module: torch.nn.Module, dtype: torch.dtype) -> LoadedWeights | None:
        """The module's weights, with their pages pinned until the caller unpins them. None, with nothing pinned, if the
        weights are unknown, or if they or their pages changed. dtype: of the module's input.
        """
        known = self._known.get(module)
        if known is None:
            return None
        state, serials, weights = known
        if any(now is not then for now, then in zip(_state(module, dtype), state, strict=True)):
            return None
        found = aimdo.fault(*module.__dict__["_v"])
        if found == serials:
            return weights
        if found is not None:
            _unpin(module)
        return None

    def keep(self, module: torch.nn.Module, dtype: torch.dtype, wanted: WeightCast, weights: LoadedWeights) -> None:
        """Keep the weights from a load, whose pages are pinned, unless core makes them again in each load."""
        own, filled = module.__dict__, aimdo.filled(module)
        is_own = all(weight is own.get(f"_v_{name}") for _, name, weight in weights)
        if is_own and filled is not None and wanted == WeightCast(dtype, dtype):
            ready = [(module, name, as_weight(weight)) for _, name, weight in weights]
            self._known[module] = _state(module, dtype), filled, ready


def _state(module: torch.nn.Module, dtype: torch.dtype) -> tuple[Any, ...]:
    """Core's result depends only on these objects and the pages. A load or a fill replaces the objects."""
    own = module.__dict__
    return dtype, own["_v"], own["_v_signature"], *[own.get(f"{name}_function") or None for name in NAMES]


@contextmanager
def loaded(
    modules: Sequence[torch.nn.Module],
    device: torch.device,
    dtype: torch.dtype,
    maps: bool,
    count: Callable[[int], None],
    resident: Resident,
) -> Iterator[LoadedWeights]:
    """The weights of paged modules, for work that is launched inside the `with`.

    dtype: of the modules' inputs. maps: nonresident pages may be mapped. Weights without pages are streamed through a
    buffer of core's, which the next load may reuse. Core's own prefetch keeps control of the modules that it loaded.
    count: called with the bytes of each module that crosses the bus. resident: weights of earlier loads.
    """
    free = [module for module in modules if "_prefetch" not in module.__dict__]
    ready: dict[torch.nn.Module, LoadedWeights] = {}
    own: list[torch.nn.Module] = []
    stream = None
    with nullcontext() if maps else aimdo.without_page_faults(free):
        try:
            for module in free:
                weights = resident.pinned(module, dtype) if maps else None
                if weights is None:
                    own.append(module)
                else:
                    ready[module] = weights
            if own:
                stream = comfy.ops.cast_modules_with_vbar(own, None, device, None, True)
                for module in own:
                    if not module.__dict__["_prefetch"].get("resident"):
                        count(module.__dict__["_v"][2])
                comfy.model_management.sync_stream(device, stream)
            found = [each for weights in ready.values() for each in weights]
            for module in modules:
                if module in ready:
                    continue
                wanted = weight_cast(module, dtype, device)
                weights = _resolved(module, device, wanted)
                if maps:
                    resident.keep(module, dtype, wanted, weights)
                found += [(module, name, as_weight(tensor)) for module, name, tensor in weights]
            yield found
        finally:
            if stream is not None:
                stream.wait_stream(comfy.model_management.current_stream(device))
            for module in ready:
                _unpin(module)
            for module in own:
                _release_prefetch(module)


def _resolved(module: torch.nn.Module, device: torch.device, wanted: WeightCast) -> LoadedWeights:
    """The weights of a module that core has loaded, in the form `wanted`."""
    tensors = comfy.ops.resolve_cast_module_with_vbar(
        module, wanted.dtype, device, wanted.bias_dtype, wanted.compute_dtype, wanted.want_requant
    )
    return [(module, name, tensor) for name, tensor in zip(NAMES, tensors, strict=True) if tensor is not None]


def _release_prefetch(module: torch.nn.Module) -> None:
    prefetch = module.__dict__.pop("_prefetch", None)
    if prefetch is None:
        return
    for name in NAMES:
        patch = getattr(module, f"{name}_lowvram_function", None)
        if patch is not None:
            patch.clear_prepared()
    if prefetch["signature"] is not None:
        _unpin(module)


def _unpin(module: torch.nn.Module) -> None:
    reservation, address, size = module.__dict__["_v"]
    reservation.unpin(address, size)
