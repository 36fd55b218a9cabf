"""The compiler `onediff`: onediff converts the module into a OneFlow module, and we build a graph of its method.

onediff keys its own graphs only by argument types, and they keep replaced weights. So we use only its conversion, and
handle graphs, keys and weights as for the compiler `lowering`.
"""

from __future__ import annotations

import collections
import copy
import importlib
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...errors import CaptureError, first_line
from ...modules.slots import swapped
from ...torch_compat.private_names import pytree
from ..base import Call, Method
from .forward import Forward
from .weights import SharedWeights, tensors_of

# Instance attributes that Resolute or ComfyUI may set; the conversion must see the class's own code.
_PATCHED_METHODS = ("forward", "_forward")


class OnediffCompiler:
    """One instance per module, because onediff converts a module once for all sizes."""

    name = "onediff"

    def __init__(self) -> None:
        self._converted: tuple[str, Any] | None = None

    def compile(self, call: Call, module: torch.nn.Module, weights: SharedWeights) -> Forward:
        """Raises CaptureError."""
        method = call.method
        if method is None:
            raise CaptureError("onediff compiles only calls of a module's own method, and this call is not one")
        if self._converted is None or self._converted[0] != call.key.model:
            self._converted = (call.key.model, convert(module))
        converted = self._converted[1]
        shared = weights.get_or_make(tensors_of(module), module)
        values = {name: weight.parameter for name, weight in shared.items()}
        return Forward(
            lambda inputs, values: run(converted, method, inputs, values), shared, values, range(len(call.tensors))
        )


def convert(module: torch.nn.Module) -> Any:
    """Convert a torch module to a OneFlow module with onediff. Raises CaptureError."""
    twin = copy.copy(module)
    for name in _PATCHED_METHODS:
        vars(twin).pop(name, None)
    # onediff registers a hook here; the copy shares everything else with the original.
    vars(twin)["_load_state_dict_post_hooks"] = collections.OrderedDict()
    try:
        compiled = importlib.import_module("onediff.infer_compiler").oneflow_compile(twin)
        return compiled._deployable_module_model.oneflow_module
    except Exception as error:
        raise CaptureError(f"onediff cannot convert {type(module).__name__}: {first_line(error)}") from error


def run(converted: Any, method: Method, inputs: Sequence[Any], values: Mapping[str, Any]) -> list[Any]:
    """Run the converted module's method with these weights. Returns the leaves of the result. Raises CaptureError."""
    positional, named = method.arguments(inputs)
    try:
        with _swapped(converted, values), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # OneFlow warns for each layer that it is not registered in the graph
            leaves: list[Any] = pytree.tree_leaves(getattr(converted, method.name)(*positional, **named))
            return leaves
    except Exception as error:
        raise CaptureError(f"the module that onediff made failed: {first_line(error)}") from error


def _swapped(converted: Any, values: Mapping[str, Any]) -> AbstractContextManager[None]:
    """In this block, the converted module uses these parameters and buffers."""
    slots = {
        (f"{path}.{name}" if path else name): (own, name)
        for path, part in converted.named_modules()
        for own in (part._parameters, part._buffers)
        for name in own
    }
    return swapped((*slots[path], value) for path, value in values.items())
