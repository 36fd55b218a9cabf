"""Where a module's weights are: the epoch that a capture depends on, and whether a capture is possible at all.

ComfyUI moves weights at will (load, offload, LoRA, hooks), often without a callback. So the addresses themselves are
read before every call; a number that changes whenever they do is the weights epoch.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ...compile_cache.errors import BypassCode, BypassReason

_epochs = itertools.count(1)


class Residency:
    """Watches one module's weights."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._slots = _slots(module)
        self._addresses: list[int] = []
        self._state: tuple[Any, ...] = ()
        self.epoch = 0
        self.blocker: BypassReason | None = None

    def refresh(self, thorough: bool = False) -> None:
        """Bring `epoch` and `blocker` up to date.

        Reading the addresses takes a fraction of a millisecond; `thorough` (when a run starts) also looks for changes
        that leave addresses alone: weights that are cast or patched on the way, modules that were exchanged.
        """
        try:
            addresses = [slots[name].data_ptr() for slots, name in self._slots]
        except (KeyError, AttributeError, RuntimeError):  # a weight was removed, or has no storage (meta, quantized)
            thorough, addresses = True, []
        if not thorough and addresses == self._addresses:
            return
        self._slots = _slots(self._module)
        tensors = [slots[name] for slots, name in self._slots]
        state = (_fingerprint(tensors), _casting(self._module))
        self._addresses = addresses
        if state == self._state:
            return
        self._state = state
        self.epoch = next(_epochs)
        self.blocker = _blocker(tensors, self._module)


def _slots(module: torch.nn.Module) -> list[tuple[dict[str, Any], str]]:
    return [
        (slots, name)
        for submodule in module.modules()
        for slots in (submodule._parameters, submodule._buffers)
        for name, tensor in slots.items()
        if tensor is not None
    ]


def _fingerprint(tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    return tuple((_address(tensor), tensor.dtype, tensor.device) for tensor in tensors)


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _casting(module: torch.nn.Module) -> tuple[Any, ...]:
    """For each of ComfyUI's ops: does it cast its weights, and what patches them on the way."""
    return tuple(
        (bool(op.comfy_cast_weights), len(getattr(op, "weight_function", ())), len(getattr(op, "bias_function", ())))
        for op in module.modules()
        if hasattr(op, "comfy_cast_weights")
    )


def _blocker(tensors: list[torch.Tensor], module: torch.nn.Module) -> BypassReason | None:
    devices = {tensor.device.type for tensor in tensors}
    if len(devices) > 1:
        return BypassReason(
            BypassCode.STREAMED_WEIGHTS,
            f"weights are on {' and '.join(sorted(devices))} (low VRAM), so the forward cannot be captured",
        )
    for op in module.modules():
        if "_v" in op.__dict__:
            return BypassReason(
                BypassCode.STREAMED_WEIGHTS,
                "ComfyUI pages these weights (DynamicVRAM) and its loader offers no other way",
            )
        if getattr(op, "weight_function", None) or getattr(op, "bias_function", None):
            return BypassReason(BypassCode.STREAMED_WEIGHTS, "weights are patched on their way in (low VRAM)")
    return None
