"""A module's weights as OneFlow parameters: one set, which all graphs of the module share.

A weight starts out as the very memory that torch uses (dlpack), so that it costs nothing and an edit in place is seen.
When a Parameter is exchanged (ComfyUI does that to apply a LoRA), that memory must not be written to: it is ComfyUI's
backup of the original. From then on that weight has memory of its own, into which the present values are copied before
each run, and graphs that were built on the old memory go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CaptureError
from .packages import oneflow


@dataclass(eq=False)
class Weight:
    """One weight of a graph. `address` is torch's memory that it shares; `own` says that it has memory of its own."""

    parameter: Any
    address: int
    own: bool
    like: tuple[Any, ...]


class Weights:
    """The weights of one module by name."""

    def __init__(self) -> None:
        self._weights: dict[str, Weight] = {}
        self._exchanged: set[str] = set()

    def take(self, names: Iterable[str], module: torch.nn.Module) -> dict[str, Weight]:
        """The weights by name, made where they are not there yet. Raises CaptureError."""
        present = tensors_of(module)
        return {name: self._take(name, _found(name, present)) for name in dict.fromkeys(names)}

    def _take(self, name: str, tensor: torch.Tensor) -> Weight:
        known = self._weights.get(name)
        if known is None or not _serves(known, tensor):
            own = name in self._exchanged or not _is_sharable(tensor)
            known = self._weights[name] = Weight(_parameter(tensor, own), tensor.data_ptr(), own, _like(tensor))
        return known

    def refresh(self, taken: Mapping[str, Weight], module: torch.nn.Module) -> bool:
        """Whether a graph with these weights can still compute with the module's present ones.

        False means that it has to be built anew; exchanged weights then get memory of their own.
        """
        present = tensors_of(module)
        stale = [name for name, weight in taken.items() if not _serves(weight, present.get(name))]
        for name in stale:
            if self._weights.get(name) is taken[name]:
                del self._weights[name]  # or the memory that ComfyUI wants back would stay for our sake
            # What moved to another device will come back, and may be shared again then.
            if name in present and _like(present[name]) == taken[name].like:
                self._exchanged.add(name)
        return not stale


class CopiedWeights:
    """Those weights of a graph that have memory of their own, and where their present values are."""

    def __init__(self, taken: Mapping[str, Weight], module: torch.nn.Module) -> None:
        slots = _slots_of(module)
        self._copied = [(weight.parameter, *slots[name]) for name, weight in taken.items() if weight.own]

    def refresh(self) -> None:
        """Copy the present values in. Before every run: an edit in place leaves no trace that could be looked for."""
        for parameter, slots, name in self._copied:
            parameter.copy_(to_oneflow(slots[name]))


def _slots_of(module: torch.nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Where each weight lives, by its name in `module`: a dictionary of a part, and the name there."""
    return {
        f"{path}.{name}" if path else name: (slots, name)
        for path, part in module.named_modules(remove_duplicate=False)
        for slots in (part._parameters, part._buffers)
        for name, tensor in slots.items()
        if tensor is not None
    }


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, a shared one under each of its names."""
    return {path: slots[name] for path, (slots, name) in _slots_of(module).items()}


def to_oneflow(tensor: torch.Tensor) -> Any:
    """A OneFlow tensor around the same memory; a copy where `_is_sharable` says no."""
    flow = oneflow()
    whole = tensor.detach().contiguous()
    if whole.dtype is torch.bool:
        return flow.utils.tensor.from_torch(whole.to(torch.uint8)).to(flow.bool)
    return flow.utils.tensor.from_torch(whole)


def _is_sharable(tensor: torch.Tensor) -> bool:
    # OneFlow's graphs want contiguous weights, and its dlpack knows no bool.
    return tensor.is_contiguous() and tensor.dtype is not torch.bool


def _parameter(tensor: torch.Tensor, own: bool) -> Any:
    shared = to_oneflow(tensor.clone(memory_format=torch.contiguous_format) if own else tensor)
    return oneflow().nn.Parameter(shared, requires_grad=False)


def _found(name: str, present: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if name not in present:
        raise CaptureError(f"the weight {name} is not where it was when the model was traced")
    return present[name]


def _serves(weight: Weight, tensor: torch.Tensor | None) -> bool:
    return tensor is not None and weight.like == _like(tensor) and (weight.own or weight.address == tensor.data_ptr())


def _like(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.dtype, tensor.device)
