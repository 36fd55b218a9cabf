"""The compiler `onediff`: onediff converts the module into a OneFlow module, and we build a graph of its method.

onediff's own graphs are keyed only by argument types and keep weights that were replaced. So we use only its
conversion; graphs, keys and weights are handled as for the compiler `lowering`.
"""

from __future__ import annotations

import collections
import copy
import importlib
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ...errors import CaptureError, first_line
from ...regions.slots import swapped
from ...torch_facts.private_names import pytree
from ..base import Call, Method
from .packages import oneflow
from .weights import SharedWeight, SharedWeights, module_of, tensors_of

# Instance attributes that Resolute or ComfyUI may set; the conversion must see the class's own code.
_PATCHED_METHODS = ("forward", "_forward")


class Supply:
    """Supplies onediff with what a OneFlow lacks: nothing, unless that is the public 0.9, which tests supply.

    missing: the class that stands for an operator that this OneFlow lacks.
    """

    missing: Any = ()

    def converting(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        """Around the conversion of a torch module."""
        return nullcontext()

    def running(self) -> AbstractContextManager[None]:
        """Around each run of a converted module."""
        return nullcontext()


class ConvertedForward:
    """A call of the converted module's method. Implements `program.Forward`."""

    def __init__(self, converted: Any, method: Method, weights: dict[str, SharedWeight], supply: Supply) -> None:
        self.weights = weights
        self._supply = supply
        self._converted = converted
        self._method: Method | None = method
        self._leaves: list[Any] = []  # of the result: indices of tensors, and plain values
        self._spec: pytree.TreeSpec | None = None

    def inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(tensors)

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        return self._run(inputs, self._parameters)

    @property
    def _parameters(self) -> dict[str, Any]:
        return {name: weight.parameter for name, weight in self.weights.items()}

    def _run(self, inputs: Sequence[Any], parameters: Mapping[str, Any]) -> list[Any]:
        method = self._method
        assert method is not None, "run after release"
        positional, named = method.arguments(inputs)
        try:
            with _swapped(self._converted, parameters), self._supply.running(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # OneFlow warns for each layer that it is not registered in the graph
                result = getattr(self._converted, method.name)(*positional, **named)
        except Exception as error:
            raise CaptureError(f"the module that onediff made failed: {first_line(error)}") from error
        leaves, self._spec = pytree.tree_flatten(result)
        for leaf in leaves:
            if isinstance(leaf, self._supply.missing):
                raise CaptureError(f"OneFlow has no {leaf.__name__}, which the module that onediff made uses")
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, oneflow().Tensor)}
        indices = {each: _TensorIndex(index) for index, each in enumerate(tensors)}
        self._leaves = [indices.get(id(leaf), leaf) for leaf in leaves]
        return list(tensors.values())

    def module(self) -> Any:
        return module_of(self._run, self._parameters)

    def unflatten(self, results: Sequence[torch.Tensor]) -> Any:
        assert self._spec is not None, "unflatten before run"
        leaves = [results[leaf] if isinstance(leaf, _TensorIndex) else leaf for leaf in self._leaves]
        return pytree.tree_unflatten(leaves, self._spec)

    def release(self) -> None:
        self._converted, self._method = None, None


class _TensorIndex(int):
    """Index of a tensor in the results."""


class OnediffCompiler:
    """One per module, because a module is converted once for all sizes."""

    name = "onediff"

    def __init__(self, supply: Supply | None = None) -> None:
        self._supply = supply or Supply()
        self._converted: tuple[str, Any] | None = None

    def compile(self, call: Call, module: torch.nn.Module, weights: SharedWeights) -> ConvertedForward:
        """Raises CaptureError."""
        if call.method is None:
            raise CaptureError("onediff compiles only calls of a module's own method, and this call is not one")
        if self._converted is None or self._converted[0] != call.key.model:
            self._converted = (call.key.model, convert(module, self._supply))
        shared = weights.get_or_make(tensors_of(module), module)
        return ConvertedForward(self._converted[1], call.method, shared, self._supply)


def convert(module: torch.nn.Module, supply: Supply) -> Any:
    """Convert a torch module to a OneFlow module with onediff. Raises CaptureError."""
    twin = copy.copy(module)
    for name in _PATCHED_METHODS:
        vars(twin).pop(name, None)
    # onediff registers a hook here; the copy shares everything else with the original.
    vars(twin)["_load_state_dict_post_hooks"] = collections.OrderedDict()
    try:
        with supply.converting(module):
            compiled = importlib.import_module("onediff.infer_compiler").oneflow_compile(twin)
            return compiled._deployable_module_model.oneflow_module
    except Exception as error:
        raise CaptureError(f"onediff cannot convert {type(module).__name__}: {first_line(error)}") from error


def _swapped(converted: Any, parameters: Mapping[str, Any]) -> AbstractContextManager[None]:
    """In this block, the converted module uses these parameters and buffers."""
    slots = {
        (f"{path}.{name}" if path else name): (own, name)
        for path, part in converted.named_modules()
        for own in (part._parameters, part._buffers)
        for name in own
    }
    return swapped((*slots[path], value) for path, value in parameters.items())
