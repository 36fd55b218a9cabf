"""Fill paged weights, and load those of a block ahead: by core's own functions, casts and LoRAs included.

See `dynamic_vram` for what pages are.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from importlib import metadata

import comfy.model_management
import comfy.ops
import torch

from . import dynamic_vram
from .dynamic_vram import NAMES
from .quantization import weight_cast

# The first comfy-aimdo that counts pins. Before it a pin is a flag, so core's unpin of a module takes ours away.
_COUNTS_PINS = (0, 3, 0)
_FUNCTIONS = ("cast_bias_weight", "uncast_bias_weight", "cast_modules_with_vbar", "resolve_cast_module_with_vbar")


@functools.cache
def why_unsupported() -> str | None:
    """Why paged weights are left to core in this process; None if this file can load them.

    It says nothing about weights that are not paged, as in ComfyUI 0.8.0.
    """
    missing = [name for name in _FUNCTIONS if not hasattr(comfy.ops, name)]
    if missing:
        return f"this ComfyUI pages weights without comfy.ops.{missing[0]}; ComfyUI 0.21.0 has it"
    version = _version_of("comfy-aimdo")
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if found is None or tuple(map(int, found.groups())) < _COUNTS_PINS:
        needed = ".".join(map(str, _COUNTS_PINS))
        return f"comfy-aimdo {version or 'of an unknown version'} pages the weights, and {needed} is needed"
    return None


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def fill(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Fill a paged module's allocation by core's own function. Its pages are mapped and pinned.

    dtype: of the module's input.
    """
    device = torch.device("cuda", dynamic_vram.allocation(module)[0].device)  # type: ignore[index]
    weight, bias, stream = comfy.ops.cast_bias_weight(
        module, device=device, offloadable=True, **asdict(weight_cast(module, dtype, device))
    )
    comfy.ops.uncast_bias_weight(module, weight, bias, stream)


@contextmanager
def loaded(
    modules: Sequence[torch.nn.Module],
    device: torch.device,
    dtype: torch.dtype,
    maps: bool = True,
    count: Callable[[int], None] = lambda size: None,
) -> Iterator[list[tuple[torch.nn.Module, str, torch.Tensor]]]:
    """The weights of paged modules as (module, name, tensor), for work that is launched inside the `with`.

    dtype: of the modules' inputs. maps: whether they may take pages that they do not have. What finds no page comes
    through a buffer of core's, which the next load may use again. Modules that core's own prefetch holds are left to
    it. count: takes the bytes that cross the bus.
    """
    own = [module for module in modules if "_prefetch" not in module.__dict__]
    stream = None
    with nullcontext() if maps else dynamic_vram.unmapped(own):
        try:
            if own:
                stream = comfy.ops.cast_modules_with_vbar(own, None, device, None, True)
                moved = [module for module in own if not module.__dict__["_prefetch"].get("resident")]
                count(sum(module.__dict__["_v"][2] for module in moved))
            comfy.model_management.sync_stream(device, stream)
            found = []
            for module in modules:
                wanted = weight_cast(module, dtype, device)
                tensors = comfy.ops.resolve_cast_module_with_vbar(
                    module, wanted.dtype, device, wanted.bias_dtype, wanted.compute_dtype, wanted.want_requant
                )
                named = zip(NAMES, tensors, strict=True)
                found += [(module, name, tensor) for name, tensor in named if tensor is not None]
            yield found
        finally:
            if stream is not None:
                stream.wait_stream(comfy.model_management.current_stream(device))
            for module in own:
                _let_go(module)


def _let_go(module: torch.nn.Module) -> None:
    prefetch = module.__dict__.pop("_prefetch", None)
    if prefetch is None:
        return
    for name in NAMES:
        patch = getattr(module, f"{name}_lowvram_function", None)
        if patch is not None:
            patch.clear_prepared()
    if prefetch["signature"] is not None:
        reservation, address, size = module.__dict__["_v"]
        reservation.unpin(address, size)
