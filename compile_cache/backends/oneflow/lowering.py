"""The compiler `lowering`: torch.export turns a call into ATen operators, and OneFlow runs each of them.

Export runs the module's own Python code once on fake tensors, so it works for any model. Torch then decomposes every
operator that `operators` does not map. Values that do not depend on an input are computed once, by torch. If an
operator without a mapping remains, lowering fails before OneFlow runs, and the error names the operator and its block.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch.export.graph_signature import InputKind

from ...errors import CaptureError, first_line
from ...torch_compat.private_names import pytree
from ..base import Call
from .forward import Forward
from .operators import MAPPED
from .packages import process_state_restored
from .weights import SharedWeights, to_oneflow

_ROOT = "module"
_CHECKS = ("aten._assert_tensor_metadata.default", "aten.sym_constrain_range.default")
# Larger constant values (bytes) are computed in the graph instead of stored.
_LARGEST_CONSTANT = 64 * 1024 * 1024


class LoweringCompiler:
    name = "lowering"

    def compile(self, call: Call, module: torch.nn.Module, weights: SharedWeights) -> Forward:
        """Raises CaptureError if export fails or an operator has no mapping."""
        lowered = Lowered(_exported(module, call.invoke, call.tensors))
        shared = weights.get_or_make(lowered.weights.values(), module)
        values = {node: shared[name].parameter for node, name in lowered.weights.items()}
        values |= {node: to_oneflow(tensor) for node, tensor in lowered.constants.items()}
        return Forward(lowered.run, shared, values, list(lowered.inputs.values()))


class _CallModule(torch.nn.Module):
    """Wraps a call as a module, so that export finds the weights by name."""

    def __init__(self, module: torch.nn.Module, invoke: Callable[[Sequence[torch.Tensor]], Any]) -> None:
        super().__init__()
        self.module = module
        self._invoke = invoke

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        leaves: list[Any] = pytree.tree_leaves(self._invoke(tensors))
        return leaves


def _exported(
    module: torch.nn.Module, invoke: Callable[[Sequence[torch.Tensor]], Any], tensors: Sequence[torch.Tensor]
) -> Any:
    try:
        with process_state_restored():
            exported = torch.export.export(_CallModule(module, invoke), tuple(tensors), strict=False)
            table = torch.export.default_decompositions()
            decomposed = {target: table[target] for target in table if str(target) not in MAPPED}
            return exported.run_decompositions({**decomposed, **_OWN_DECOMPOSITIONS})
    except Exception as error:
        cause = f"{type(error).__name__}: {first_line(error)}"
        raise CaptureError(f"torch.export failed on this model: {cause}") from error


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Does not read the old value of `target`, which may be large and expensive to compute."""
    return source.to(target.dtype).expand(target.shape)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if dropout_p or is_causal or enable_gqa:
        raise NotImplementedError("attention with dropout, a causal mask or grouped heads")
    scores = query * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale) @ key.transpose(-2, -1)
    if attn_mask is not None:
        scores = torch.where(attn_mask, scores, -torch.inf) if attn_mask.dtype is torch.bool else scores + attn_mask
    return scores.softmax(-1) @ value


def _upsample_nearest(
    x: torch.Tensor, output_size: Sequence[int] | None, scale_factors: Sequence[float] | None
) -> torch.Tensor:
    scaled = zip(x.shape[2:], scale_factors or (), strict=False)
    for dim, size in enumerate(output_size or [math.floor(old * factor) for old, factor in scaled], start=2):
        x = x.index_select(dim, torch.arange(size, device=x.device) * x.shape[dim] // size)
    return x


# These replace torch's own, which decompose attention to a device kernel and do not decompose the other two.
_OWN_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.copy.default: _copy,
    torch.ops.aten.scaled_dot_product_attention.default: _attention,
    torch.ops.aten.upsample_nearest2d.vec: _upsample_nearest,
}


class Lowered:
    """An exported call that OneFlow can run. Raises CaptureError if an operator has no mapping.

    All three map node names of the graph. inputs: to indices of the call's tensors. weights: to names in the module.
    constants: to tensors that torch computed.
    """

    def __init__(self, exported: Any) -> None:
        self._graph: torch.fx.Graph = exported.graph
        self.inputs: dict[str, int] = {}
        self.weights: dict[str, str] = {}
        self.constants: dict[str, torch.Tensor] = {}
        for node in list(self._graph.nodes):
            if str(node.target) in _CHECKS:
                self._graph.erase_node(node)
        self._graph.eliminate_dead_code()
        computed = self._read_placeholders(exported)
        for node in self._graph.nodes:
            if node.op == "call_function" and computed.keys() >= set(node.all_input_nodes) and _is_computable(node):
                arguments, keywords = torch.fx.node.map_arg((node.args, node.kwargs), computed.__getitem__)
                computed[node] = node.target(*arguments, **keywords)
            elif node.op != "placeholder":
                _require_mapping(node)
                read = {each.name: computed[each] for each in node.all_input_nodes if each in computed}
                self.constants.update((name, each) for name, each in read.items() if isinstance(each, torch.Tensor))
        # Nodes that the interpreter does not run. A tensor among them is unused, or `run` sets it by name.
        self._known = {node: None for node in self._graph.nodes if node.op == "placeholder"}
        self._known |= {node: None if isinstance(each, torch.Tensor) else each for node, each in computed.items()}

    def _read_placeholders(self, exported: Any) -> dict[torch.fx.Node, Any]:
        """Record the inputs and weights that the graph uses. Returns the constants that the module's code created."""
        number, made = itertools.count(), {}
        nodes = {node.name: node for node in self._graph.nodes}
        for spec in exported.graph_signature.input_specs:
            node = nodes[spec.arg.name]
            if spec.kind is InputKind.USER_INPUT:
                index = next(number)
                if node.users:
                    self.inputs[node.name] = index
            elif spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER):
                made[node] = exported.constants[spec.target]
            elif node.users:
                self.weights[node.name] = str(spec.target).removeprefix(f"{_ROOT}.")
        return made

    def run(self, inputs: Sequence[Any], values: Mapping[str, Any]) -> list[Any]:
        """Return the leaves of the call's result. values: OneFlow tensors of weights and constants."""
        tensors = {**values, **dict(zip(self.inputs, inputs, strict=True))}
        known = {node: tensors.get(node.name, value) for node, value in self._known.items()}
        interpreter = _OneFlowInterpreter(torch.nn.Module(), graph=self._graph)
        interpreter.extra_traceback = False
        return list(interpreter.run(initial_env=known, enable_io_processing=False))


def _require_mapping(node: torch.fx.Node) -> None:
    if node.op == "call_function" and node.target is not operator.getitem and str(node.target) not in MAPPED:
        raise CaptureError(f"OneFlow has no operator for {node.target}, which {_block(node)} uses")


def _is_computable(node: torch.fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    tags = getattr(node.target, "tags", ())
    result = node.meta.get("val")
    size = result.numel() * result.element_size() if isinstance(result, torch.Tensor) else 0
    return torch.Tag.nondeterministic_seeded not in tags and size <= _LARGEST_CONSTANT


class _OneFlowInterpreter(torch.fx.Interpreter):
    def run_node(self, n: torch.fx.Node) -> Any:
        try:
            return super().run_node(n)
        except Exception as error:
            raise CaptureError(f"OneFlow refused {n.name} in {_block(n)}: {first_line(error)}") from error

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function = target if target is operator.getitem else MAPPED[str(target)]
        return function(*args, **kwargs)


def _block(node: torch.fx.Node) -> str:
    """The innermost block that a node belongs to: "output_blocks.3.1.attn1 (CrossAttention)"."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = stack[-1] if stack else ("", "")
    path = path.removeprefix(f"{_ROOT}.") if path != _ROOT else ""
    kind = (kind if isinstance(kind, str) else kind.__qualname__).rpartition(".")[2]
    return f"{path} ({kind})" if path else "the module itself"
