"""The compiler `lowering`: torch.export turns a call into ATen operators, and each is mapped to a OneFlow function.

Export runs the module's own Python once on fake tensors, so nothing is assumed about the model. Torch computes every
value that does not depend on an input, once. If an operator has no mapping, lowering fails before OneFlow runs, and the
error names the operator and its block.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch.export.graph_signature import InputKind

from ...errors import CaptureError, first_line
from ...torch_facts.private_names import pytree
from ..base import Call
from .operators import MAPPED
from .packages import process_state_restored
from .weights import SharedWeight, SharedWeights, module_of, to_oneflow

_ROOT = "module"
_CHECKS = ("aten._assert_tensor_metadata.default", "aten.sym_constrain_range.default")
# Larger constant values (bytes) are computed in the graph instead of stored.
_LARGEST_CONSTANT = 64 * 1024 * 1024


@dataclass(frozen=True, eq=False)
class Step:
    """One operator and its arguments. block: the module block it belongs to, for error texts."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    block: str


@dataclass(frozen=True, slots=True)
class Value:
    """Refers to an input, a weight, a constant or an earlier step's result in the arguments of a step."""

    name: str


@dataclass(eq=False)
class Lowered:
    """A whole forward as OneFlow operators over named values. spec: pytree structure of the forward's result."""

    spec: pytree.TreeSpec
    inputs: dict[str, int] = field(default_factory=dict)  # value -> index in the call's tensors
    weights: dict[str, str] = field(default_factory=dict)  # value -> name of the weight in the module
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)  # each a Value, or a plain Python value

    @property
    def results(self) -> list[str]:
        """Names of the values that the graph returns, each once."""
        return list(dict.fromkeys(output.name for output in self.outputs if isinstance(output, Value)))

    def run(self, inputs: Sequence[Any], values: Mapping[str, Any]) -> list[Any]:
        """Run the steps and return the tensors of `results`. values: OneFlow tensors of weights and constants."""
        values = {**values, **dict(zip(self.inputs, inputs, strict=True))}
        for step in self.steps:
            arguments, keywords = _substituted((step.arguments, dict(step.keywords)), values)
            try:
                values[step.name] = step.function(*arguments, **keywords)
            except Exception as error:
                raise CaptureError(f"OneFlow refused {step.name} in {step.block}: {first_line(error)}") from error
        return [values[name] for name in self.results]

    def unflatten(self, results: Sequence[torch.Tensor]) -> Any:
        """Put `results` into the structure that the forward returns; a tensor may occur in it more than once."""
        made = dict(zip(self.results, results, strict=True))
        leaves = [made[output.name] if isinstance(output, Value) else output for output in self.outputs]
        return pytree.tree_unflatten(leaves, self.spec)


class _CallModule(torch.nn.Module):
    """Wraps a call as a module, so that export finds the weights by name."""

    def __init__(self, module: torch.nn.Module, flat: Callable[..., list[Any]]) -> None:
        super().__init__()
        self.module = module
        self._flat = flat

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        return self._flat(*tensors)


def lower(
    module: torch.nn.Module, invoke: Callable[[Sequence[torch.Tensor]], Any], tensors: Sequence[torch.Tensor]
) -> Lowered:
    """Lower the forward of one call. Raises CaptureError if export fails or an operator has no mapping."""
    specs: list[pytree.TreeSpec] = []

    def flat(*inputs: torch.Tensor) -> list[Any]:
        leaves, spec = pytree.tree_flatten(invoke(inputs))
        specs.append(spec)
        values: list[Any] = leaves
        return values

    try:
        with process_state_restored():
            exported = torch.export.export(_CallModule(module, flat), tuple(tensors), strict=False)
            exported = exported.run_decompositions({})
    except Exception as error:
        cause = f"{type(error).__name__}: {first_line(error)}"
        raise CaptureError(f"torch.export failed on this model: {cause}") from error
    return _Lowering(exported, specs[-1]).lowered


class _Lowering:
    def __init__(self, exported: Any, spec: pytree.TreeSpec) -> None:
        self.lowered = Lowered(spec=spec)
        self._computed: dict[str, Any] = {}  # node name -> value that torch has computed
        graph: torch.fx.Graph = exported.graph
        _drop_ignored_operands(graph)
        self._add_inputs(exported)
        for node in graph.nodes:
            if node.op == "call_function" and str(node.target) not in _CHECKS:
                self._add_node(node)
            elif node.op == "output":
                self._add_outputs(node)
        self._drop_unused()

    def _add_inputs(self, exported: Any) -> None:
        given = itertools.count()
        for spec in exported.graph_signature.input_specs:
            name = spec.arg.name
            if spec.kind is InputKind.USER_INPUT:
                self.lowered.inputs[name] = next(given)
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                self.lowered.weights[name] = str(spec.target).removeprefix(f"{_ROOT}.")
            else:
                self._computed[name] = exported.constants[spec.target]

    def _add_node(self, node: torch.fx.Node) -> None:
        if all(source.name in self._computed for source in node.all_input_nodes) and self._is_computable(node):
            arguments, keywords = _mapped((node.args, dict(node.kwargs)), lambda each: self._computed[each.name])
            self._computed[node.name] = node.target(*arguments, **keywords)  # type: ignore[operator]
            return
        block = _block(node)
        function = operator.getitem if node.target is operator.getitem else MAPPED.get(str(node.target))
        if function is None:
            raise CaptureError(f"OneFlow has no operator for {node.target}, which {block} uses")
        arguments, keywords = _mapped((node.args, dict(node.kwargs)), self._value)
        self.lowered.steps.append(Step(node.name, function, arguments, keywords, block))

    def _is_computable(self, node: torch.fx.Node) -> bool:
        if node.target is operator.getitem:
            return True
        tags = getattr(node.target, "tags", ())
        result = node.meta.get("val")
        size = result.numel() * result.element_size() if isinstance(result, torch.Tensor) else 0
        return torch.Tag.nondeterministic_seeded not in tags and size <= _LARGEST_CONSTANT

    def _value(self, node: torch.fx.Node) -> Any:
        computed = self._computed.get(node.name)
        if computed is not None and not isinstance(computed, torch.Tensor):
            return computed
        if computed is not None:
            self.lowered.constants[node.name] = computed
        return Value(node.name)

    def _add_outputs(self, node: torch.fx.Node) -> None:
        self.lowered.outputs = [
            self._value(each) if isinstance(each, torch.fx.Node) else each
            for each in node.args[0]  # type: ignore[union-attr]
        ]

    def _drop_unused(self) -> None:
        """Remove steps that no output depends on; shape arithmetic and checks leave some."""
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


def _drop_ignored_operands(graph: torch.fx.Graph) -> None:
    """Remove first operands whose content an operator ignores; they are often large empty tensors."""
    for node in graph.nodes:
        is_sum = str(node.target) == "aten.baddbmm.default" and node.kwargs.get("beta", 1) == 0
        is_copy = str(node.target) == "aten.copy.default" and _shape_and_dtype(node.args[0]) == _shape_and_dtype(
            node.args[1]
        )
        if is_sum or is_copy:
            node.args = (node.args[1], *node.args[1:])
    graph.eliminate_dead_code()


def _shape_and_dtype(node: Any) -> tuple[Any, ...]:
    value = node.meta["val"]
    return (tuple(value.shape), value.dtype)


def _block(node: torch.fx.Node) -> str:
    """The innermost block that a node belongs to: "output_blocks.3.1.attn1 (CrossAttention)"."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = stack[-1] if stack else ("", "")
    path = path.removeprefix(f"{_ROOT}.") if path != _ROOT else ""
    kind = (kind if isinstance(kind, str) else kind.__qualname__).rpartition(".")[2]
    return f"{path} ({kind})" if path else "the module itself"


def _mapped(arguments: Any, function: Callable[[torch.fx.Node], Any]) -> Any:
    return torch.fx.node.map_arg(arguments, function)


def _substituted(arguments: Any, values: Mapping[str, Any]) -> Any:
    return pytree.tree_map(lambda leaf: values[leaf.name] if isinstance(leaf, Value) else leaf, arguments)


class LoweredForward:
    """A lowered call with its weights, from which a graph is built. Implements `program.Forward`."""

    def __init__(self, lowered: Lowered, weights: Mapping[str, SharedWeight]) -> None:
        self.weights = {name: weights[name] for name in lowered.weights.values()}
        self._lowered = lowered
        self._values = {value: weights[name].parameter for value, name in lowered.weights.items()}
        self._values |= {value: to_oneflow(tensor) for value, tensor in lowered.constants.items()}

    def inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensors[index] for index in self._lowered.inputs.values()]

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        return self._lowered.run(inputs, self._values)

    def module(self) -> Any:
        return module_of(self._lowered.run, self._values)

    def unflatten(self, results: Sequence[torch.Tensor]) -> Any:
        return self._lowered.unflatten(results)

    def release(self) -> None:
        self._values = {}
        self._lowered.steps, self._lowered.constants = [], {}


class LoweringCompiler:
    name = "lowering"

    def compile(self, call: Call, module: torch.nn.Module, weights: SharedWeights) -> LoweredForward:
        """Raises CaptureError."""
        lowered = lower(module, call.invoke, call.tensors)
        return LoweredForward(lowered, weights.get_or_make(lowered.weights.values(), module))
