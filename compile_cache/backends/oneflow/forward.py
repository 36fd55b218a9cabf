"""What a compiler makes of a call: a forward on OneFlow tensors, of which a graph is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...errors import CaptureError
from ...torch_facts.private_names import pytree
from ..base import Call
from .packages import oneflow
from .weights import SharedWeight, SharedWeights


@dataclass(eq=False)
class Forward:
    """The forward of one call. `Any` in the lists is a OneFlow tensor.

    run(inputs, values): runs every operator, eagerly outside a graph, and returns the leaves of the call's result.
    Raises CaptureError. values: OneFlow tensors by name, above all the parameters of `weights`. inputs: indices of the
    call's tensors that it reads.
    """

    run: Callable[[Sequence[Any], Mapping[str, Any]], list[Any]]
    weights: Mapping[str, SharedWeight]
    values: Mapping[str, Any]
    inputs: Sequence[int]

    def make_graph(self, structure: Structure) -> Any:
        """A oneflow.nn.Graph that returns the tensors of `structure`; its first call compiles it."""
        flow = oneflow()  # the base classes exist only after it is imported
        # A graph reads only its module's weights, and this module needs short names for them.
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
        """Free what is not needed once the graph is built: it keeps `make_graph`'s module, which keeps this."""
        self.run, self.values = _released, {}


def _released(inputs: Sequence[Any], values: Mapping[str, Any]) -> list[Any]:
    raise AssertionError("run after release")


class Compiler(Protocol):
    name: str

    def compile(self, call: Call, module: torch.nn.Module, weights: SharedWeights) -> Forward:
        """Make a forward for `call`; does not compile a OneFlow plan. Raises CaptureError with the reason."""
        ...


class Structure:
    """How the tensors of a call's result lie in it. A tensor may occur in it more than once, and plain values may."""

    def __init__(self, result: Any) -> None:
        leaves, self._spec = pytree.tree_flatten(result)
        places: dict[int, int] = {}  # identity of a tensor -> its number
        self._first: list[int] = []  # of each tensor: the first leaf that it is
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
        """The OneFlow tensors of a result with this structure, each once. Raises CaptureError if it has another one."""
        if len(leaves) != len(self._leaves):
            raise CaptureError(f"OneFlow returns {len(leaves)} values instead of {len(self._leaves)}")
        tensors = [leaves[place] for place in self._first]
        for tensor in tensors:
            if not isinstance(tensor, oneflow().Tensor):
                raise CaptureError(f"OneFlow returns {tensor!r} in place of a tensor")
        return tensors

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The result with these tensors in it."""
        leaves = [tensors[leaf] if isinstance(leaf, _TensorNumber) else leaf for leaf in self._leaves]
        return pytree.tree_unflatten(leaves, self._spec)


class _TensorNumber(int):
    """The number of a tensor in the result."""
