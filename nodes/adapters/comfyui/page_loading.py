"""Fill paged weights, and load those of a block ahead: by core's own functions, casts and LoRAs included.

See `dynamic_vram` for what pages are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import comfy.model_management
import comfy.ops
import torch

from . import dynamic_vram
from .dynamic_vram import NAMES


def fill(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Fill a paged module's allocation by core's own function. Its pages are mapped and pinned.

    dtype: that the module computes in; LoRAs are applied in it.
    """
    device = torch.device("cuda", dynamic_vram.allocation(module)[0].device)  # type: ignore[index]
    weight, bias, stream = comfy.ops.cast_bias_weight(
        module, dtype=dtype, device=device, bias_dtype=dtype, offloadable=True
    )
    comfy.ops.uncast_bias_weight(module, weight, bias, stream)


@contextmanager
def loaded(
    modules: Sequence[torch.nn.Module], device: torch.device, dtype: torch.dtype
) -> Iterator[list[tuple[torch.nn.Module, str, torch.Tensor]]]:
    """The weights of paged modules as (module, name, tensor), for work that is launched inside the `with`.

    What finds no page comes through a buffer of core's, which the next load may use again. Modules that core's own
    prefetch holds are left to it.
    """
    own = [module for module in modules if "_prefetch" not in module.__dict__]
    stream = None
    try:
        if own:
            stream = comfy.ops.cast_modules_with_vbar(own, None, device, None, True)
        comfy.model_management.sync_stream(device, stream)
        found = []
        for module in modules:
            tensors = comfy.ops.resolve_cast_module_with_vbar(module, dtype, device, dtype, None, False)
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
        dynamic_vram.unpin(*dynamic_vram.allocation(module))  # type: ignore[misc]
