"""Cut the graph of a region by what its values depend on: a prologue of the time, and the rest.

A diffusion model computes part of a block from its weights and the time alone. These values are equal in all calls at
one noise level. `split` finds them in a traced graph, not by names of modules: the prologue computes them, and the rest
takes them as inputs. The same operators run on the same values, so no bit of the results changes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..torch_facts.private_names import OpOverload

# Of an input; "" if it may differ in every call.
TIME = "time"
SIZE = "size"  # it has no values: only its sizes say something

Groups = Sequence[Hashable | None]

# What a value depends on besides weights, in rising order.
_NOTHING, _TIME, _CHANGING = range(3)
_UNSTEADY = ("nondeterministic_seeded", "data_dependent_output", "dynamic_output_shape")  # tags of operators
_FUNCTIONS_OF_SIZES = frozenset(
    each
    for names in (operator, math, torch)
    for name, each in vars(names).items()
    if callable(each) and (names is not torch or name.startswith("sym_"))
)


class StaysWholeError(Exception):
    """The graph cannot be split; the text says why."""


@dataclass(frozen=True, eq=False)
class Part:
    """One part of a split graph.

    graph: takes the tensors of `weights`, then those of `inputs`; for the rest, also what the prologue returns.
    weights, inputs: indices into the weights and the inputs of the whole graph.
    """

    graph: torch.fx.GraphModule
    weights: tuple[int, ...]
    inputs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Split:
    """prologue: computes what depends on weights and the time only; it returns a list of tensors.
    rest: takes its weights, all inputs, and then the results of the prologue.
    results: a fake tensor for each result of the prologue, with symbols of the trace as sizes.
    groups: the weights that only the prologue reads.
    """

    prologue: Part
    rest: Part
    results: tuple[torch.Tensor, ...]
    groups: frozenset[Hashable]


def split(graph: torch.fx.Graph, groups: Groups, steady: Sequence[str]) -> Split:
    """Cut a traced graph over weights and then inputs.

    groups: for each weight of the graph, what is loaded together with it (its module); None if it cannot be left out.
    steady: for each input TIME, SIZE or "".

    Raises StaysWholeError for random numbers, for shapes that depend on values, for writes to what the prologue
    computes, for constants, and if the prologue would spare no group.
    """
    holders = [node for node in graph.nodes if node.op == "placeholder"]
    if len(holders) != len(groups) + len(steady):
        raise ValueError(f"{len(holders)} inputs of the graph are not {len(groups)} weights and {len(steady)} inputs")
    return _Cut(graph, holders[: len(groups)], holders[len(groups) :], groups, steady).parts()


class _Cut:
    """The values of a graph by what they depend on."""

    def __init__(
        self,
        graph: torch.fx.Graph,
        weights: list[torch.fx.Node],
        inputs: list[torch.fx.Node],
        groups: Groups,
        steady: Sequence[str],
    ) -> None:
        self._graph, self._weights, self._inputs, self._groups = graph, weights, inputs, groups
        self._steady = dict(zip(inputs, steady, strict=True))
        self._of_prologue = tuple(number for number, each in enumerate(steady) if each in (TIME, SIZE))
        # The sizes that a prologue has: an input of its own, and the dimension.
        self._sizes: dict[Any, tuple[torch.fx.Node, int]] = {}
        for number in self._of_prologue:
            for axis, size in enumerate(inputs[number].meta["val"].shape):
                self._sizes.setdefault(_expression(size), (inputs[number], axis))
        self._kinds: dict[torch.fx.Node, int] = {}
        for node in graph.nodes:
            self._kinds[node] = self._kind_of(node)
        for node in graph.nodes:
            self._refuse_writes(node)

    def _kind_of(self, node: torch.fx.Node) -> int:
        if node.op == "placeholder":
            return {TIME: _TIME, "": _CHANGING}.get(self._steady.get(node, SIZE), _NOTHING)
        if node.op == "output":
            return _CHANGING
        if node.op != "call_function":
            raise StaysWholeError(f"the trace has a constant ({node.name})")
        target = node.target
        if isinstance(target, OpOverload):
            unsteady = [tag for tag in _UNSTEADY if getattr(torch.Tag, tag) in target.tags]
            if unsteady and not _drops_nothing(node):
                raise StaysWholeError(f"{target} is {unsteady[0]}")
        elif target not in _FUNCTIONS_OF_SIZES:
            raise StaysWholeError(f"the trace calls {target}")
        if _is_size(node):
            return _NOTHING  # see `_has_size`
        kind = max((self._kinds[each] for each in node.all_input_nodes), default=_NOTHING)
        sizes = [each for each in node.all_input_nodes if _is_size(each)]
        return kind if not sizes or (kind == _TIME and all(map(self._has_size, sizes))) else _CHANGING

    def _has_size(self, size: torch.fx.Node) -> bool:
        """It is a size of what the prologue has, or follows from such sizes."""
        own = size.all_input_nodes
        return _expression(size.meta["val"]) in self._sizes or (
            bool(own) and all(self._has_size(each) if _is_size(each) else self._kinds[each] == _TIME for each in own)
        )

    def _refuse_writes(self, node: torch.fx.Node) -> None:
        """A write is harmless if one part makes all that it reaches, and only this part reads it."""
        kind = self._kinds[node]
        written = node.all_input_nodes[0] if _writes(node) and node.all_input_nodes else None
        while written is not None:
            own = self._kinds[written] == kind and (
                kind == _CHANGING or (kind == _TIME and all(self._kinds[user] == kind for user in written.users))
            )
            if written.op == "placeholder" or not own:
                raise StaysWholeError(f"{node.target} writes to what another part reads")
            if not isinstance(written.target, OpOverload) or not (written.target.is_view or _writes(written)):
                return
            written = written.all_input_nodes[0]

    def _is_of_prologue(self, node: torch.fx.Node) -> bool:
        return node.op == "call_function" and self._kinds[node] == _TIME

    def _reached(self, starts: Sequence[torch.fx.Node], in_rest: bool) -> set[torch.fx.Node]:
        """The nodes that a part runs or reads to compute `starts`."""
        found: set[torch.fx.Node] = set()
        left = list(starts)
        while left:
            node = left.pop()
            if node not in found and not (in_rest and self._is_of_prologue(node)):
                found.add(node)
                left += () if not in_rest and self._is_given_size(node) else node.all_input_nodes
        return found

    def _is_given_size(self, node: torch.fx.Node) -> bool:
        return _is_size(node) and _expression(node.meta["val"]) in self._sizes

    def _groups_of(self, nodes: set[torch.fx.Node]) -> frozenset[Hashable]:
        return frozenset(group for node, group in zip(self._weights, self._groups, strict=True) if node in nodes)

    def parts(self) -> Split:
        (output,) = [node for node in self._graph.nodes if node.op == "output"]
        writes = [node for node in self._graph.nodes if _writes(node)]
        rest = self._reached([output, *writes], in_rest=True)
        own = [node for node in self._graph.nodes if self._is_of_prologue(node)]
        results = [node for node in own if any(user in rest for user in node.users)]
        if not all(isinstance(node.meta["val"], torch.Tensor) for node in results):
            raise StaysWholeError("a prologue returns something else than tensors")
        prologue = self._reached([*results, *[node for node in own if _writes(node)]], in_rest=False)
        groups = self._groups_of(prologue) - self._groups_of(rest) - {None}
        if not groups:
            raise StaysWholeError("no weights serve the time alone")
        every = tuple(range(len(self._inputs)))
        return Split(
            self._part(prologue, self._of_prologue, None, results),
            self._part(rest, every, results, output.args[0]),
            tuple(node.meta["val"] for node in results),
            groups,
        )

    def _part(
        self, nodes: set[torch.fx.Node], inputs: tuple[int, ...], kept: Sequence[torch.fx.Node] | None, output: Any
    ) -> Part:
        """A part that returns `output`. kept: the values that the rest gets; None for the prologue."""
        built = torch.fx.Graph()
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        weights = tuple(number for number, node in enumerate(self._weights) if node in nodes)
        given = [*[self._weights[number] for number in weights], *[self._inputs[number] for number in inputs]]
        for node, name in [
            *[(node, node.name) for node in given],
            *[(node, f"kept_{node.name}") for node in kept or ()],
        ]:
            copies[node] = built.placeholder(name)
            copies[node].meta = dict(node.meta)
        for node in self._graph.nodes:
            if node not in nodes or node in copies or node.op == "output":
                continue
            if kept is None and self._is_given_size(node):
                holder, axis = self._sizes[_expression(node.meta["val"])]
                copies[node] = built.call_function(torch.ops.aten.sym_size.int, (copies[holder], axis))
                copies[node].meta = dict(node.meta)
            else:
                copies[node] = built.node_copy(node, copies.__getitem__)
        built.output(torch.fx.map_arg(output, copies.__getitem__))
        built.lint()  # type: ignore[no-untyped-call]
        return Part(torch.fx.GraphModule(torch.nn.Module(), built), weights, inputs)


def _writes(node: torch.fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _is_size(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool, torch.SymFloat))


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _drops_nothing(node: torch.fx.Node) -> bool:
    """An attention whose dropout is 0 draws no random numbers, whatever its tag says."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if "dropout_p" not in names:
        return False
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return bool(given.get("dropout_p", 0.0) == 0.0)
