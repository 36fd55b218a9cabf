"""The output of a compiler for a call: a forward on OneFlow tensors, from which a graph is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...errors import CaptureError
from ...torch_compat.private_names import pytree
from ..base import Call
from .packages import oneflow
from .weights import SharedWeight, SharedWeights


@dataclass(eq=False)
class Forward:
    """The forward of one call. `Any` in the lists is a OneFlow tensor.

    run(inputs, values): runs every operator (eagerly outside a graph) and returns the leaves of the call's result.
    Raises CaptureError. values: OneFlow tensors by name: the parameters of `weights`, and constants. inputs: indices of
    the call's tensors that `run` reads.
    """

    run: Callable[[Sequence[Any], Mapping[str, Any]], list[Any]]
    weights: Mapping[str, SharedWeight]
    values: Mapping[str, Any]
    inputs: Sequence[int]

    def make_graph(self, structure: Structure) -> Any:
        """A oneflow.nn.Graph that returns the tensors of `structure`; its first call compiles it."""
        flow = oneflow()  # the base classes exist only after the import
        # A graph reads only weights registered on its module, and registration needs short names.
        fields = {name: f"value_{number}" for number, name in enumerate(self.values)}
        forward = self

        class ForwardModule(flow.nn.Module):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                for name, field in fields.items():
                    value = forward.values[name]
                    is_parameter = isinstance(value, flow.nn.Parameter)
                    (self.register_parameter if is_parameter else self.register_buffer)(field, value)

            def forward(self, *inputs: Any) -> list[Any]:
                values = {name: getattr(self, field) for name, field in fields.items()}
                return structure.tensors(forward.run(inputs, values))

        class ForwardGraph(flow.nn.Graph):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.forward_module = ForwardModule()

            def build(self, *inputs: Any) -> Any:
                return self.forward_module(*inputs)

        return ForwardGraph()

    def release(self) -> None:
        """Free `run` and `values` once the graph is built: the graph keeps its module and so this object alive."""
        self.run, self.values = _released, {}


def _released(inputs: Sequence[Any], values: Mapping[str, Any]) -> list[Any]:
    raise AssertionError("run after release")


class Compiler(Protocol):
    name: str

    def compile(self, call: Call, module: torch.nn.Module, weights: SharedWeights) -> Forward:
        """Make a forward for `call` without compiling a OneFlow plan. Raises CaptureError with the reason."""
        ...


class Structure:
    """The nesting of a call's result. A tensor may occur in it more than once, and plain values may occur too."""

    def __init__(self, result: Any) -> None:
        leaves, self._spec = pytree.tree_flatten(result)
        places: dict[int, int] = {}  # identity of a tensor -> its number
        self._first: list[int] = []  # for each tensor, the index of its first leaf
        self._leaves: list[Any] = []
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                self._leaves.append(leaf)
                continue
            if id(leaf) not in places:
                places[id(leaf)] = len(places)
                self._first.append(place)
            self._leaves.append(_TensorNumber(places[id(leaf)]))

    def tensors(self, leaves: Sequence[Any]) -> list[Any]:
        """The distinct OneFlow tensors of a result. Raises CaptureError if the result has another structure."""
        if len(leaves) != len(self._leaves):
            raise CaptureError(f"OneFlow returns {len(leaves)} values instead of {len(self._leaves)}")
        tensors = [leaves[place] for place in self._first]
        for tensor in tensors:
            if not isinstance(tensor, oneflow().Tensor):
                raise CaptureError(f"OneFlow returns {tensor!r} in place of a tensor")
        return tensors

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The result, rebuilt with these tensors."""
        leaves = [tensors[leaf] if isinstance(leaf, _TensorNumber) else leaf for leaf in self._leaves]
        return pytree.tree_unflatten(leaves, self._spec)


class _TensorNumber(int):
    """A leaf of the result that is a tensor: the tensor's number."""
