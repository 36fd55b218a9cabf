"""Where a module's weights are: the epoch that a capture depends on, and whether a capture is possible at all.

ComfyUI moves weights at will (load, offload, LoRA, hooks), often without a callback. So the addresses themselves are
read before every call; a number that changes whenever they do is the weights epoch.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Hashable
from typing import Any

import torch

from ....compile_cache.errors import BypassCode, BypassReason
from ....compile_cache.regions.foreign_code import is_own
from .model_code import ModelCode
from .module_state import ModuleStates

_epochs = itertools.count(1)


class WeightsTracker:
    """Watches one module's weights. All clones of a model share one: their epochs must agree.

    It does not keep the module alive: that it is gone is how everything that belongs to it is let go.
    """

    def __init__(self, module: torch.nn.Module, trusted: Collection[str] = ()) -> None:
        """trusted: see `ModelCode.blocker`."""
        self._module = weakref.ref(module)
        self._slots: list[tuple[dict[str, Any], str]] = []
        self._addresses: list[int] | None = None
        self._conditions = ModuleStates()
        self._code = ModelCode()
        self._trusted = trusted
        self._state: tuple[Any, ...] | None = None
        self.epoch = 0
        self.blocker: BypassReason | None = None
        self.recaptured: set[Hashable] = set()  # see `recapture`

    def refresh(self, thorough: bool = False) -> bool:
        """Bring `epoch` and `blocker` up to date. Returns whether it looked closely: always where addresses changed.

        Reading the addresses takes a fraction of a millisecond; `thorough` (at a run's first call) also looks for what
        leaves addresses alone: weights that are cast or patched on the way, settings, modules that were exchanged.
        """
        if not thorough and self._addresses is not None and self._addresses == self._read_addresses():
            return False
        root = self._module()
        if root is None:
            return False
        modules = list(root.modules())
        for submodule in modules:
            if "forward" in (attributes := vars(submodule)) and is_own(submodule, "forward", attributes["forward"]):
                del attributes["forward"]
        self._slots = [
            (slots, name)
            for submodule in modules
            for slots in (submodule._parameters, submodule._buffers)
            for name, tensor in slots.items()
            if tensor is not None
        ]
        self._addresses = self._read_addresses()
        tensors = [slots[name] for slots, name in self._slots]
        addresses = self._addresses or [_address(tensor) for tensor in tensors]
        conditions = self._conditions.read(modules, root)
        kinds, reach = self._code.read(modules)
        state = (
            addresses,
            [(type(tensor), tensor.dtype, tensor.device) for tensor in tensors],
            conditions,
            kinds,
            reach,
        )
        if state != self._state:
            self._state = state
            self.epoch = next(_epochs)
            foreign = any(marks for _, marks, *_ in conditions)
            self.blocker = _blocker(tensors, modules, foreign) or self._code.blocker(kinds, reach, self._trusted)
        return True

    def _read_addresses(self) -> list[int] | None:
        try:
            return [slots[name].data_ptr() for slots, name in self._slots]
        except (KeyError, AttributeError, RuntimeError):  # a weight was removed, or has no storage (meta, quantized)
            return None


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _blocker(tensors: list[torch.Tensor], modules: list[torch.nn.Module], foreign: bool) -> BypassReason | None:
    devices = {tensor.device.type for tensor in tensors}
    if len(devices) > 1 or "meta" in devices:
        return BypassReason(
            BypassCode.STREAMED_WEIGHTS,
            f"weights are on {' and '.join(sorted(devices))} (low VRAM), so the forward cannot be captured",
        )
    unreadable = next((tensor for tensor in tensors if type(tensor) not in (torch.nn.Parameter, torch.Tensor)), None)
    if unreadable is not None:
        return BypassReason(
            BypassCode.UNREADABLE_WEIGHTS,
            f"a weight is a {type(unreadable).__name__}, and its address does not show every change of it",
        )
    if foreign:
        return BypassReason(
            BypassCode.REPLACED_FORWARD,
            "another pack put code of its own into the model, and a capture could not follow what it does",
        )
    for module in modules:
        attributes = vars(module)
        if "_v" in attributes:
            return BypassReason(BypassCode.STREAMED_WEIGHTS, "ComfyUI pages these weights in as it goes (DynamicVRAM)")
        if attributes.get("weight_function") or attributes.get("bias_function"):
            return BypassReason(BypassCode.STREAMED_WEIGHTS, "weights are patched on their way in (low VRAM)")
    return None
