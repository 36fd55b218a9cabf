"""Split the graph of a region by the dependencies of its values: a prologue of the time, and the rest.

A diffusion model computes part of a block from its weights and the time alone. These values are equal in all calls at
one noise level. `split` detects them in a traced graph, not by names of modules: the prologue computes them, and the
rest takes them as inputs. The same operators run on the same values, so no bit of the results changes.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..torch_compat.private_names import OpOverload

# The dependencies of a value besides weights and the sizes of time tensors, in rising order.
_NOTHING, _TIME, _CHANGING = range(3)
# Results of operators with these tags may differ from call to call.
_UNSTEADY = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class CannotSplitError(Exception):
    """The graph cannot be split; the text says why."""


@dataclass(frozen=True, eq=False)
class Part:
    """One part of a split graph.

    graph: takes the tensors of `weights`, then inputs, and returns a list. weights: indices into the weights of the
    whole graph.
    """

    graph: torch.fx.GraphModule
    weights: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Split:
    """prologue: computes the values that depend on weights and the time only; its inputs are the times.
    rest: takes all inputs, and then the results of the prologue.
    results: a fake tensor for each result of the prologue, with symbols of the trace as sizes.
    """

    prologue: Part
    rest: Part
    results: tuple[torch.Tensor, ...]


def split(graph: torch.fx.Graph, weights: int, times: Collection[int]) -> Split:
    """Split a traced graph, which takes `weights` weights, then inputs. times: indices of inputs. Modifies the graph.

    Raises CannotSplitError for constants, for unknown functions and for writes to values that both parts read.
    """
    holders = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = [node for node in graph.nodes if node.op == "output"]
    own, inputs = holders[:weights], holders[weights:]
    of_time = [inputs[index] for index in times]
    _read_sizes_of(of_time, graph)
    kinds = dict.fromkeys(own, _NOTHING) | dict.fromkeys(inputs, _CHANGING) | dict.fromkeys(of_time, _TIME)
    nodes = [node for node in graph.nodes if node not in kinds and node is not output]
    for node in nodes:
        kinds[node] = _kind_of(node, [kinds[each] for each in node.all_input_nodes])
    kinds[output] = _CHANGING
    for node in filter(_writes, nodes):
        _refuse_shared_write(node, kinds)
    results = [node for node in nodes if kinds[node] == _TIME and any(kinds[user] != _TIME for user in node.users)]
    return Split(
        _part(own, of_time, [node for node in nodes if kinds[node] < _CHANGING], results),
        _part(own, [*inputs, *results], [node for node in nodes if kinds[node] != _TIME], output.args[0]),
        tuple(node.meta["val"] for node in results),
    )


def _read_sizes_of(times: Iterable[torch.fx.Node], graph: torch.fx.Graph) -> None:
    """Read each size that a time tensor has from that tensor, because a trace may read it from any input."""
    places: dict[Any, tuple[torch.fx.Node, int]] = {}
    for holder in times:
        for axis, size in enumerate(holder.meta["val"].shape):
            if isinstance(size, torch.SymInt):
                places.setdefault(size.node.expr, (holder, axis))
    for node in list(graph.nodes):
        if _is_size(node) and node.meta["val"].node.expr in places:
            with graph.inserting_before(node):
                read = graph.call_function(torch.ops.aten.sym_size.int, places[node.meta["val"].node.expr])
            read.meta = dict(node.meta)
            node.replace_all_uses_with(read)
            graph.erase_node(node)


def _kind_of(node: torch.fx.Node, of_inputs: Iterable[int]) -> int:
    if node.op != "call_function":
        raise CannotSplitError(f"the trace has a constant ({node.name})")
    kind = max(of_inputs, default=_NOTHING)
    if _is_size(node):
        return kind if kind == _CHANGING else _NOTHING
    if isinstance(node.target, OpOverload):
        return _CHANGING if _UNSTEADY.intersection(node.target.tags) else kind
    if node.target is not operator.getitem:
        raise CannotSplitError(f"the trace calls {node.target}")
    return kind


def _refuse_shared_write(node: torch.fx.Node, kinds: dict[torch.fx.Node, int]) -> None:
    """Raise CannotSplitError for a write, unless one part makes every value that it reaches and alone reads them."""
    written: Any = node
    while _writes(written) or written.target is operator.getitem or getattr(written.target, "is_view", False):
        written = written.kwargs.get("out", written.args[0])
        read_by = {kinds[each] for each in (written, *written.users)}
        if written.op == "placeholder" or len(read_by) > 1 or _NOTHING in read_by:
            raise CannotSplitError(f"{node.target} writes to what another part reads")


def _part(
    weights: Sequence[torch.fx.Node], inputs: Sequence[torch.fx.Node], nodes: Iterable[torch.fx.Node], result: Any
) -> Part:
    """Return the part that computes `result` from the nodes in `nodes` that it needs."""
    built = torch.fx.Graph()
    copies = {node: built.placeholder(node.name) for node in (*weights, *inputs)}
    for node in nodes:
        copies[node] = built.node_copy(node, copies.__getitem__)
    built.output(torch.fx.map_arg(result, copies.__getitem__))
    built.eliminate_dead_code()
    used = tuple(index for index, node in enumerate(weights) if copies[node].users)
    for node in weights:
        if not copies[node].users:
            built.erase_node(copies[node])
    return Part(torch.fx.GraphModule(torch.nn.Module(), built), used)


def _writes(node: torch.fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _is_size(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool, torch.SymFloat))
