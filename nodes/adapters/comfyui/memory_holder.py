"""Lists our captures among ComfyUI's loaded models, so that ComfyUI can free their memory like that of models.

Core's `free_memory` has no callback. It asks each of `current_loaded_models` for memory: for some bytes before it loads
a model or decodes, and for all bytes on Unload Models, on Free, and after a prompt ran out of memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import comfy.model_management
import comfy.model_patcher
import torch

# The loaded bytes that core sees. Core unloads a part of a model that has more loaded than core needs, and otherwise
# the whole model; to unload all models it asks for 1e30 bytes.
_ALWAYS_ENOUGH = 1 << 60


class CapturedGraphs(torch.nn.Module):
    """The model of the patcher below: it has no weights. Its class name is in core's log."""


class MemoryHolder(comfy.model_patcher.ModelPatcher):
    """A patcher that ComfyUI can unload. Its size is the memory of our captures.

    held: returns the bytes of the captures. give_back: frees memory; its argument is True if all models are unloaded.
    """

    def __init__(self, device: torch.device, held: Callable[[], int], give_back: Callable[[bool], object]) -> None:
        super().__init__(CapturedGraphs(), device, device)
        self._held, self._give_back = held, give_back

    def register(self) -> None:
        """Add this patcher to the loaded models, unless it is there. Core removes it when it unloads it."""
        management = comfy.model_management
        if any(loaded.model is self for loaded in management.current_loaded_models):
            return
        loaded = management.LoadedModel(self)
        loaded.real_model = weakref.ref(self.model)
        loaded.model_finalizer = weakref.finalize(self.model, management.cleanup_models)
        loaded.model_finalizer.atexit = False
        management.current_loaded_models.append(loaded)

    def model_size(self) -> int:
        return self._held()

    def loaded_size(self) -> int:
        return _ALWAYS_ENOUGH

    def partially_load(self, *args: Any, **kwargs: Any) -> int:
        return 0

    def partially_unload(self, device_to: Any, memory_to_free: int = 0, *args: Any, **kwargs: Any) -> int:
        self._give_back(False)
        return memory_to_free  # if it were less, core would remove the holder from the list

    def detach(self, unpatch_all: bool = True) -> torch.nn.Module:
        if unpatch_all:
            self._give_back(True)
        model: torch.nn.Module = self.model
        return model

    def __del__(self) -> None:
        """There is nothing to unload."""
