"""The compiler `lowering`: a call is exported to ATen operators, and those are mapped to OneFlow one by one.

Exporting runs the module's own Python once on fake tensors; nothing is guessed about the model. What does not depend on
an input is computed once by torch. An operator without a mapping is named with the block in which it stands, before
OneFlow has seen anything.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
import torch.utils._pytree as pytree
from torch.export.graph_signature import InputKind

from ...errors import CaptureError, first_line
from ..base import Call
from .operators import MAPPED
from .packages import oneflow, undisturbed
from .weights import Weight, Weights, to_oneflow

_ROOT = "module"
_CHECKS = ("aten._assert_tensor_metadata.default", "aten.sym_constrain_range.default")
# More than this, and a value that could be computed once is left to the graph.
_LARGEST_CONSTANT = 64 * 1024 * 1024


@dataclass(frozen=True, eq=False)
class Step:
    """One operator. Values go by name; `place` is the block that it stands in, for people."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    place: str


@dataclass(frozen=True, slots=True)
class Value:
    """A result of an earlier step, a weight, a constant or an input, in the arguments of a step."""

    name: str


@dataclass(eq=False)
class Lowered:
    """A whole forward as OneFlow operators over named values; `spec` is the shape of what it returns."""

    spec: pytree.TreeSpec
    inputs: dict[str, int] = field(default_factory=dict)  # value -> the tensor's place in the call
    weights: dict[str, str] = field(default_factory=dict)  # value -> the weight's name in the module
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)  # Value, or a plain value that the forward returns

    @property
    def results(self) -> list[str]:
        """The values that leave the graph, each once."""
        return list(dict.fromkeys(output.name for output in self.outputs if isinstance(output, Value)))

    def run(self, given: Mapping[str, Any]) -> list[Any]:
        """Runs the steps on OneFlow tensors, inputs, weights and constants by name; answers `results`."""
        values = dict(given)
        for step in self.steps:
            arguments, keywords = _filled((step.arguments, dict(step.keywords)), values)
            try:
                values[step.name] = step.function(*arguments, **keywords)
            except Exception as error:
                raise CaptureError(f"OneFlow refused {step.name} in {step.place}: {first_line(error)}") from error
        return [values[name] for name in self.results]

    def rebuilt(self, results: Sequence[torch.Tensor]) -> Any:
        """What the forward returns, around `results`. A tensor that it hands out twice is handed out twice here."""
        made = dict(zip(self.results, results, strict=True))
        leaves = [made[output.name] if isinstance(output, Value) else output for output in self.outputs]
        return pytree.tree_unflatten(leaves, self.spec)


class _Whole(torch.nn.Module):
    """A call as a module, so that export finds the weights by name."""

    def __init__(self, module: torch.nn.Module, flat: Callable[..., list[Any]]) -> None:
        super().__init__()
        self.module = module
        self._flat = flat

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        return self._flat(*tensors)


def lower(
    module: torch.nn.Module, invoke: Callable[[Sequence[torch.Tensor]], Any], tensors: Sequence[torch.Tensor]
) -> Lowered:
    """The forward of one call as OneFlow operators. Raises CaptureError with what stands in the way."""
    specs: list[pytree.TreeSpec] = []

    def flat(*inputs: torch.Tensor) -> list[Any]:
        leaves, spec = pytree.tree_flatten(invoke(inputs))
        specs.append(spec)
        return leaves

    try:
        with undisturbed():
            exported = torch.export.export(_Whole(module, flat), tuple(tensors), strict=False)
            exported = exported.run_decompositions({})
    except Exception as error:
        cause = f"{type(error).__name__}: {first_line(error)}"
        raise CaptureError(f"torch.export cannot follow this model: {cause}") from error
    return _Lowering(exported, specs[-1]).lowered


class _Lowering:
    def __init__(self, exported: Any, spec: pytree.TreeSpec) -> None:
        self.lowered = Lowered(spec=spec)
        self._known: dict[str, Any] = {}  # values that torch computes here, by node
        graph: torch.fx.Graph = exported.graph
        _drop_ignored(graph)
        self._take_inputs(exported)
        for node in graph.nodes:
            if node.op == "call_function" and str(node.target) not in _CHECKS:
                self._take(node)
            elif node.op == "output":
                self._take_outputs(node)
        self._drop_unneeded()

    def _take_inputs(self, exported: Any) -> None:
        given = itertools.count()
        for spec in exported.graph_signature.input_specs:
            name = spec.arg.name
            if spec.kind is InputKind.USER_INPUT:
                self.lowered.inputs[name] = next(given)
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                self.lowered.weights[name] = str(spec.target).removeprefix(f"{_ROOT}.")
            else:
                self._known[name] = exported.constants[spec.target]

    def _take(self, node: torch.fx.Node) -> None:
        if all(source.name in self._known for source in node.all_input_nodes) and self._is_computable(node):
            arguments, keywords = _mapped((node.args, dict(node.kwargs)), lambda each: self._known[each.name])
            self._known[node.name] = node.target(*arguments, **keywords)  # type: ignore[operator]
            return
        place = _place(node)
        function = operator.getitem if node.target is operator.getitem else MAPPED.get(str(node.target))
        if function is None:
            raise CaptureError(f"OneFlow has no operator for {node.target}, which stands in {place}")
        arguments, keywords = _mapped((node.args, dict(node.kwargs)), self._value)
        self.lowered.steps.append(Step(node.name, function, arguments, keywords, place))

    def _is_computable(self, node: torch.fx.Node) -> bool:
        if node.target is operator.getitem:
            return True
        tags = getattr(node.target, "tags", ())
        result = node.meta.get("val")
        size = result.numel() * result.element_size() if isinstance(result, torch.Tensor) else 0
        return torch.Tag.nondeterministic_seeded not in tags and size <= _LARGEST_CONSTANT

    def _value(self, node: torch.fx.Node) -> Any:
        known = self._known.get(node.name)
        if known is not None and not isinstance(known, torch.Tensor):
            return known
        if known is not None:
            self.lowered.constants[node.name] = known
        return Value(node.name)

    def _take_outputs(self, node: torch.fx.Node) -> None:
        self.lowered.outputs = [
            self._value(each) if isinstance(each, torch.fx.Node) else each
            for each in node.args[0]  # type: ignore[union-attr]
        ]

    def _drop_unneeded(self) -> None:
        """What no output depends on: checks and shapes leave such steps behind."""
        needed = {output.name for output in self.lowered.outputs if isinstance(output, Value)}
        kept: list[Step] = []
        for step in reversed(self.lowered.steps):
            if step.name in needed:
                kept.append(step)
                needed.update(_names_in(step))
        self.lowered.steps = kept[::-1]
        for values in (self.lowered.inputs, self.lowered.weights, self.lowered.constants):
            for name in values.keys() - needed:
                values.pop(name)


def _names_in(step: Step) -> list[str]:
    leaves = pytree.tree_leaves((step.arguments, dict(step.keywords)))
    return [leaf.name for leaf in leaves if isinstance(leaf, Value)]


def _drop_ignored(graph: torch.fx.Graph) -> None:
    """Some operators ignore what is in their first input, often a large empty tensor: nothing should make it."""
    for node in graph.nodes:
        is_sum = str(node.target) == "aten.baddbmm.default" and node.kwargs.get("beta", 1) == 0
        is_copy = str(node.target) == "aten.copy.default" and _like(node.args[0]) == _like(node.args[1])
        if is_sum or is_copy:
            node.args = (node.args[1], *node.args[1:])
    graph.eliminate_dead_code()


def _like(node: Any) -> tuple[Any, ...]:
    value = node.meta["val"]
    return (tuple(value.shape), value.dtype)


def _place(node: torch.fx.Node) -> str:
    """The innermost block that a node belongs to: "output_blocks.3.1.attn1 (CrossAttention)"."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = stack[-1] if stack else ("", "")
    path = path.removeprefix(f"{_ROOT}.") if path != _ROOT else ""
    kind = (kind if isinstance(kind, str) else kind.__qualname__).rpartition(".")[2]
    return f"{path} ({kind})" if path else "the module itself"


def _mapped(arguments: Any, function: Callable[[torch.fx.Node], Any]) -> Any:
    return torch.fx.node.map_arg(arguments, function)


def _filled(arguments: Any, values: Mapping[str, Any]) -> Any:
    return pytree.tree_map(lambda leaf: values[leaf.name] if isinstance(leaf, Value) else leaf, arguments)


class LoweredForward:
    """A lowered call with its weights in place: what a graph is made of."""

    def __init__(self, lowered: Lowered, taken: Mapping[str, Weight]) -> None:
        self.weights = {name: taken[name] for name in lowered.weights.values()}
        self._lowered = lowered
        self._values = {value: taken[name].parameter for value, name in lowered.weights.items()}
        self._values |= {value: to_oneflow(tensor) for value, tensor in lowered.constants.items()}

    def inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensors[place] for place in self._lowered.inputs.values()]

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        return self._lowered.run({**self._values, **dict(zip(self._lowered.inputs, inputs, strict=True))})

    def module(self) -> Any:
        return _module_of(self._lowered, self._values)

    def rebuilt(self, results: Sequence[torch.Tensor]) -> Any:
        return self._lowered.rebuilt(results)

    def release(self) -> None:
        self._values = {}
        self._lowered.steps, self._lowered.constants = [], {}


class LoweringCompiler:
    name = "lowering"

    def compile(self, call: Call, module: torch.nn.Module, weights: Weights) -> LoweredForward:
        """Raises CaptureError."""
        lowered = lower(module, call.invoke, call.tensors)
        return LoweredForward(lowered, weights.take(lowered.weights.values(), module))


def _module_of(lowered: Lowered, given: Mapping[str, Any]) -> Any:
    """A oneflow.nn.Module that holds the weights under short names: a graph reads them from the module, not from us."""
    flow = oneflow()
    fields = {value: f"value_{number}" for number, value in enumerate(given)}

    class LoweredModule(flow.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            for value, name in fields.items():
                if isinstance(given[value], flow.nn.Parameter):
                    self.register_parameter(name, given[value])
                else:
                    self.register_buffer(name, given[value])

        def forward(self, *inputs: Any) -> list[Any]:
            values = {value: getattr(self, name) for value, name in fields.items()}
            return lowered.run({**values, **dict(zip(lowered.inputs, inputs, strict=True))})

    return LoweredModule()
