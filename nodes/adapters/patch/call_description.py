"""Describe one call of a module: its tensors, its plain values, and the reasons against a capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ....compile_cache.backends.base import Method
from ....compile_cache.call_policy import ANYTHING, CallPolicy
from ....compile_cache.errors import BypassCode, BypassReason
from ....compile_cache.keys import Component, Signature, TensorSpec
from ..comfyui.chosen_attention import attention_of
from ..comfyui.transformer_options import COND_ORDER, OVERRIDE, patches_in, unknown_in
from ..trust.core_code import may_read_cond_order

_LARGEST = 2**63  # Python refuses to format integers with too many digits
_LONGEST_NAME = 500  # of an argument; ends the recursion into a container that contains itself


@dataclass
class CallDescription:
    """The tensors of a call (flat, in the order of its signature), its plain values, and if it may be captured."""

    names: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    values: list[Component] = field(default_factory=list)
    policy: CallPolicy = ANYTHING
    method: Method | None = None  # see Call
    why_captured: str = ""
    benchmark_eager: bool = False  # see Call
    conds: int = 0  # how many conditionings share the batch, 2 under CFG; 0 if unknown

    def quick_key(self) -> tuple[Any, ...]:
        """Cheaper to make and to compare than the signature. Equal quick keys have equal signatures."""
        tensors = tuple([(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in self.tensors])
        return (tuple(self.names), tensors, repr(self.values))

    def signature(self) -> Signature:
        """The part of the graph's key that depends on this call, not on the model or the backend."""
        specs = tuple((name, tensor_spec(tensor)) for name, tensor in zip(self.names, self.tensors, strict=True))
        return Signature(specs, tuple(self.values))

    def forbid_capture(self, detail: str) -> None:
        """Forbid a capture. detail: the reason, as a sentence for people; the first reason wins."""
        self.policy = self.policy.run_once(BypassReason(BypassCode.OBSERVED_INPUT, detail))

    def add(self, name: str, value: Any) -> Callable[[Sequence[torch.Tensor]], Any]:
        """Describe one argument. Returns a function that rebuilds it from replacements for all tensors of the call.

        Containers are rebuilt each time, because core pops ControlNet residuals out of them.
        """
        try:
            return self._add(name, value)
        except Exception:  # noqa: BLE001 (of the code of a class of anybody's)
            self.forbid_capture(f"'{name}' cannot be described")
            return lambda tensors: value

    def _add(self, name: str, value: Any) -> Callable[[Sequence[torch.Tensor]], Any]:
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            index = len(self.tensors)
            self.names.append(name)
            self.tensors.append(value)
            return lambda tensors: tensors[index]
        is_number = type(value) is int and -_LARGEST < value < _LARGEST
        if value is None or is_number or type(value) in (bool, float, str):
            self.values.append((name, value))
            return lambda tensors: value
        if isinstance(value, Mapping) and len(name) < _LONGEST_NAME:
            self.values.append((name, tuple(str(key) for key in value)))
            parts = {key: self.add(f"{name}.{key}", item) for key, item in value.items()}
            return lambda tensors: {key: build(tensors) for key, build in parts.items()}
        if type(value) in (list, tuple) and len(name) < _LONGEST_NAME:
            kind: type = type(value)
            self.values.append((name, len(value)))
            items = [self.add(f"{name}[{i}]", item) for i, item in enumerate(value)]
            return lambda tensors: kind(build(tensors) for build in items)
        self.forbid_capture(f"'{name}' is a {type(value).__name__}, which is no input of a graph")
        return lambda tensors: value

    def add_options(self, options: Mapping[str, Any], module: torch.nn.Module) -> None:
        """Refuse a capture for anything in transformer_options that could change what `module` computes."""
        try:
            self._add_options(options, module)
        except Exception:  # noqa: BLE001 (as in `add`)
            self.forbid_capture("transformer_options cannot be described")

    def _add_options(self, options: Mapping[str, Any], module: torch.nn.Module) -> None:
        self.conds = len(options.get(COND_ORDER) or ())
        if COND_ORDER in options and may_read_cond_order(type(module)):
            self.values.append((COND_ORDER, tuple(options[COND_ORDER])))
        if kinds := patches_in(options):
            self.forbid_capture(f"another node patches the model ({', '.join(kinds)})")
        unknown = unknown_in(options)
        attention = attention_of(options) if OVERRIDE in unknown else None
        if attention is not None:  # one of core's own functions, whichever node chose it
            self.values.append((OVERRIDE, attention))
            unknown.remove(OVERRIDE)
        if unknown:
            self.forbid_capture(f"transformer_options holds '{unknown[0]}', which may differ from call to call")


def tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    """The spec of a tensor. Captures copy it into a contiguous or channels-last buffer: no other stride matters."""
    layout = "contiguous"
    if tensor.ndim == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last):
        layout = "channels_last"
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.device.type, layout)
