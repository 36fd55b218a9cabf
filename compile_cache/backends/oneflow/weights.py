"""A module's weights as OneFlow parameters, shared by all graphs of the module.

At first a weight shares torch's memory (dlpack): that costs nothing, and graphs see in-place edits. When ComfyUI
replaces a Parameter to apply a LoRA, it keeps the old memory as its backup of the original, so we must not write to it.
From then on the weight is a copy, refreshed before each run, and graphs built on the old memory are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CaptureError
from ...modules.slots import Slot, tensor_slots
from .packages import oneflow


@dataclass(eq=False)
class SharedWeight:
    """One weight. address: the torch memory that it shares. is_copy: True if it has its own memory instead."""

    parameter: Any
    address: int
    is_copy: bool
    spec: tuple[Any, ...]


class SharedWeights:
    """The weights of one module by name."""

    def __init__(self) -> None:
        self._weights: dict[str, SharedWeight] = {}
        self._replaced: set[str] = set()

    def get_or_make(self, names: Iterable[str], module: torch.nn.Module) -> dict[str, SharedWeight]:
        """The weights with these names. Raises CaptureError if the module lacks one."""
        current = tensors_of(module)
        return {name: self._get_or_make(name, _found(name, current)) for name in dict.fromkeys(names)}

    def _get_or_make(self, name: str, tensor: torch.Tensor) -> SharedWeight:
        weight = self._weights.get(name)
        if weight is None or not _is_current(weight, tensor):
            is_copy = name in self._replaced or not _is_sharable(tensor)
            weight = SharedWeight(_parameter(tensor, is_copy), tensor.data_ptr(), is_copy, _spec(tensor))
            self._weights[name] = weight
        return weight

    def refresh(self, weights: Mapping[str, SharedWeight], module: torch.nn.Module) -> bool:
        """Return True if a graph with these weights can use the module's current ones.

        Otherwise the graph must be rebuilt, and replaced weights become copies.
        """
        current = tensors_of(module)
        stale = [name for name, weight in weights.items() if not _is_current(weight, current.get(name))]
        for name in stale:
            if self._weights.get(name) is weights[name]:
                del self._weights[name]  # otherwise we would keep alive the memory that ComfyUI wants to free
            # A weight on another device will return and can be shared again, so do not mark it as replaced.
            if name in current and _spec(current[name]) == weights[name].spec:
                self._replaced.add(name)
        return not stale


class CopiedWeights:
    """The copied weights of a graph, and the slots in the module with their current values."""

    def __init__(self, weights: Mapping[str, SharedWeight], module: torch.nn.Module) -> None:
        slots = _slots_of(module)
        self._copied = [(weight.parameter, *slots[name]) for name, weight in weights.items() if weight.is_copy]

    def refresh(self) -> None:
        """Copy the current values. Needed before every run, because an edit in place cannot be detected."""
        for parameter, slots, name in self._copied:
            parameter.copy_(to_oneflow(slots[name]))


def _slots_of(module: torch.nn.Module) -> dict[str, Slot]:
    """The slot of each weight, by its full name."""
    return {
        f"{path}.{name}" if path else name: (slots, name)
        for path, part in module.named_modules(remove_duplicate=False)
        for slots, name in tensor_slots(part)
    }


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, a shared one under each of its names."""
    return {path: slots[name] for path, (slots, name) in _slots_of(module).items()}


def to_oneflow(tensor: torch.Tensor) -> Any:
    """A OneFlow tensor that shares memory with `tensor`, or a copy if the memory is not sharable (`_is_sharable`)."""
    flow = oneflow()
    whole = tensor.detach().contiguous()
    if whole.dtype is torch.bool:
        return flow.utils.tensor.from_torch(whole.to(torch.uint8)).to(flow.bool)
    return flow.utils.tensor.from_torch(whole)


def _is_sharable(tensor: torch.Tensor) -> bool:
    # OneFlow's graphs need contiguous weights, and its dlpack does not support bool.
    return tensor.is_contiguous() and tensor.dtype is not torch.bool


def _parameter(tensor: torch.Tensor, is_copy: bool) -> Any:
    shared = to_oneflow(tensor.clone(memory_format=torch.contiguous_format) if is_copy else tensor)
    return oneflow().nn.Parameter(shared, requires_grad=False)


def _found(name: str, current: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if name not in current:
        raise CaptureError(f"the module had the weight {name} when it was traced, and does not have it any more")
    return current[name]


def _is_current(weight: SharedWeight, tensor: torch.Tensor | None) -> bool:
    if tensor is None or weight.spec != _spec(tensor):
        return False
    return weight.is_copy or weight.address == tensor.data_ptr()


def _spec(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.dtype, tensor.device)
