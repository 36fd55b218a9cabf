"""Cut the graph of a region by what its values depend on: prologues of steady inputs, and the rest.

A diffusion model computes part of a block from its weights and the time alone, or from its weights and the text alone.
Such values are equal in many calls. `split` finds them in a traced graph, not by names of modules: a prologue computes
them, and the rest takes them as inputs. The same operators run on the same values, so no bit of the results changes.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..torch_facts.private_names import OpOverload

TIME = "time"
TEXT = "text"
SIZE = "size"  # of an input without values: only its sizes say something
SOURCES = (TIME, TEXT)
_CHANGING = ""  # an input that may differ in every call

Kinds = frozenset[str]
Groups = Sequence[Hashable | None]
_NOTHING: Kinds = frozenset()
_OTHER: Kinds = frozenset({_CHANGING})
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

    graph: takes the tensors of `weights`, then those of `inputs`; for the rest, also what the prologues return.
    weights, inputs: indices into the weights and the inputs of the whole graph.
    """

    graph: torch.fx.GraphModule
    weights: tuple[int, ...]
    inputs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Prologue(Part):
    """Computes what depends on weights and inputs of one source only. It returns a list of tensors.

    results: a fake tensor for each, with symbols of the trace as sizes. groups: the weights that no other part reads.
    """

    source: str
    results: tuple[torch.Tensor, ...]
    groups: frozenset[Hashable]


@dataclass(frozen=True, eq=False)
class Split:
    """rest: takes its weights, its inputs, and then the results of each prologue, in their order."""

    prologues: tuple[Prologue, ...]
    rest: Part


def split(graph: torch.fx.Graph, groups: Groups, steady: Sequence[str]) -> Split:
    """Cut a traced graph over weights and then inputs.

    groups: for each weight of the graph, what is loaded together with it (its module); None if it cannot be left out.
        A source whose prologue would spare no group is not cut.
    steady: for each input TIME, TEXT, SIZE, or "" if it may change in every call.

    Raises StaysWholeError for random numbers, for shapes that depend on values, for writes to what a prologue computes,
    for constants, and if no group would be spared.
    """
    holders = [node for node in graph.nodes if node.op == "placeholder"]
    if len(holders) != len(groups) + len(steady):
        raise ValueError(f"{len(holders)} inputs of the graph are not {len(groups)} weights and {len(steady)} inputs")
    sources = [source for source in SOURCES if source in steady]
    while sources:
        kept_apart = [source if source in (*sources, SIZE) else _CHANGING for source in steady]
        cut = _Cut(graph, holders, groups, kept_apart)
        useless = [source for source in sources if not cut.spared(source)]
        if not useless:
            return cut.parts(sources)
        sources = [source for source in sources if source not in useless]
    raise StaysWholeError("no weights serve steady inputs alone")


class _Cut:
    """The values of a graph by what they depend on."""

    def __init__(
        self, graph: torch.fx.Graph, holders: list[torch.fx.Node], groups: Groups, steady: Sequence[str]
    ) -> None:
        self._graph = graph
        self._weights = holders[: len(groups)]
        self._inputs = holders[len(groups) :]
        self._groups = groups
        self._steady = steady
        self._sources = [source for source in SOURCES if source in steady]
        self._sizes = self._steady_sizes()
        self._kinds: dict[torch.fx.Node, Kinds] = {}
        for node in graph.nodes:
            self._kinds[node] = self._kind_of(node)
        for node in graph.nodes:
            self._refuse_writes(node)

    def _steady_sizes(self) -> dict[tuple[str, Any], tuple[torch.fx.Node, int]]:
        """By source and symbol: an input of that source and its dimension with this size."""
        found: dict[tuple[str, Any], tuple[torch.fx.Node, int]] = {}
        for node, steady in zip(self._inputs, self._steady, strict=True):
            for source in SOURCES if steady == SIZE else (steady,):
                for axis, size in enumerate(node.meta["val"].shape):
                    found.setdefault((source, _expression(size)), (node, axis))
        return found

    def _kind_of(self, node: torch.fx.Node) -> Kinds:
        if node.op == "placeholder":
            if node in self._weights:
                return _NOTHING
            steady = self._steady[self._inputs.index(node)]
            return _NOTHING if steady == SIZE else frozenset({steady})
        if node.op == "output":
            return _OTHER
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
            return _NOTHING  # see `_can_size`
        kinds = _NOTHING.union(*(self._kinds[each] for each in node.all_input_nodes))
        sizes = [each for each in node.all_input_nodes if _is_size(each)]
        if sizes and not (len(kinds) == 1 and all(self._can_size(next(iter(kinds)), each) for each in sizes)):
            return kinds | _OTHER
        return kinds

    def _is_size_of(self, source: str, size: torch.fx.Node) -> bool:
        return (source, _expression(size.meta["val"])) in self._sizes

    def _can_size(self, source: str, size: torch.fx.Node) -> bool:
        """It is a size of what the source's prologue has, or follows from such sizes."""
        if self._is_size_of(source, size):
            return True
        own = size.all_input_nodes
        return bool(own) and all(
            self._can_size(source, each) if _is_size(each) else self._kinds[each] == {source} for each in own
        )

    def _refuse_writes(self, node: torch.fx.Node) -> None:
        """A write is harmless if one part makes all that it reaches, and only this part reads it."""
        if not _writes(node):
            return
        kinds = self._kinds[node]
        written = node.all_input_nodes[0] if node.all_input_nodes else None
        while written is not None:
            in_rest = _CHANGING in self._kinds[written] and _CHANGING in kinds
            own = self._kinds[written] == kinds and all(self._kinds[user] == kinds for user in written.users)
            if written.op == "placeholder" or not (in_rest or (own and len(kinds) == 1)):
                raise StaysWholeError(f"{node.target} writes to what another part reads")
            if not isinstance(written.target, OpOverload) or not (written.target.is_view or _writes(written)):
                return
            written = written.all_input_nodes[0]

    def _is_of(self, node: torch.fx.Node, source: str) -> bool:
        return node.op == "call_function" and self._kinds[node] == {source}

    def _reached(self, starts: Sequence[torch.fx.Node], source: str | None) -> set[torch.fx.Node]:
        """The nodes that one part runs or reads to compute `starts`. source: None for the rest."""
        found: set[torch.fx.Node] = set()
        left = list(starts)
        while left:
            node = left.pop()
            if node in found or (source is None and any(self._is_of(node, each) for each in self._sources)):
                continue
            found.add(node)
            if source is None or not (_is_size(node) and self._is_size_of(source, node)):
                left += node.all_input_nodes
        return found

    def _results(self, source: str) -> list[torch.fx.Node]:
        """The values of a prologue that the rest reads."""
        rest = self._rest
        own = [node for node in self._graph.nodes if self._is_of(node, source)]
        found = [node for node in own if any(user in rest for user in node.users)]
        if not all(isinstance(node.meta["val"], torch.Tensor) for node in found):
            raise StaysWholeError("a prologue returns something else than tensors")
        return found

    @functools.cached_property
    def _rest(self) -> set[torch.fx.Node]:
        return self._reached([node for node in self._graph.nodes if node.op == "output" or _writes(node)], None)

    def _prologue(self, source: str) -> set[torch.fx.Node]:
        writes = [node for node in self._graph.nodes if self._is_of(node, source) and _writes(node)]
        return self._reached([*self._results(source), *writes], source)

    def spared(self, source: str) -> frozenset[Hashable]:
        """The groups of weights that the prologue of this source reads, and nothing else."""
        others = [self._rest, *[self._prologue(other) for other in self._sources if other != source]]
        return self._groups_of(self._prologue(source)).difference({None}, *map(self._groups_of, others))

    def _groups_of(self, nodes: set[torch.fx.Node]) -> frozenset[Hashable]:
        return frozenset(group for node, group in zip(self._weights, self._groups, strict=True) if node in nodes)

    def parts(self, sources: Sequence[str]) -> Split:
        results = {source: self._results(source) for source in sources}
        prologues = []
        for source in sources:
            nodes = self._prologue(source)
            built, part = self._build(nodes, [], source)
            built.output([part[node] for node in results[source]])
            prologues.append(
                Prologue(
                    _module(built),
                    self._weights_in(nodes),
                    tuple(number for number, each in enumerate(self._steady) if each in (source, SIZE)),
                    source,
                    tuple(node.meta["val"] for node in results[source]),
                    self.spared(source),
                )
            )
        nodes = self._rest
        kept = [node for source in sources for node in results[source]]
        built, part = self._build(nodes, kept, None)
        (output,) = [node for node in self._graph.nodes if node.op == "output"]
        built.output(torch.fx.map_arg(output.args[0], lambda node: part[node]))
        rest = Part(_module(built), self._weights_in(nodes), tuple(range(len(self._inputs))))
        return Split(tuple(prologues), rest)

    def _weights_in(self, nodes: set[torch.fx.Node]) -> tuple[int, ...]:
        return tuple(number for number, node in enumerate(self._weights) if node in nodes)

    def _build(
        self, nodes: set[torch.fx.Node], kept: Sequence[torch.fx.Node], source: str | None
    ) -> tuple[torch.fx.Graph, Mapping[torch.fx.Node, torch.fx.Node]]:
        """A graph of these nodes without its output, and the copy of each node. source: None for the rest."""
        built = torch.fx.Graph()
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        given = zip(self._inputs, self._steady, strict=True)
        own = [node for node, each in given if source is None or each in (source, SIZE)]
        for node in [*[weight for weight in self._weights if weight in nodes], *own, *kept]:
            name = f"kept_{node.name}" if node in kept else node.name
            copies[node] = built.placeholder(name)
            copies[node].meta = dict(node.meta)
        for node in self._graph.nodes:
            if node not in nodes or node in copies or node.op == "output":
                continue
            if source is not None and _is_size(node) and self._is_size_of(source, node):
                holder, axis = self._sizes[source, _expression(node.meta["val"])]
                copies[node] = built.call_function(torch.ops.aten.sym_size.int, (copies[holder], axis))
                copies[node].meta = dict(node.meta)
            else:
                copies[node] = built.node_copy(node, lambda each: copies[each])
        return built, copies


def _writes(node: torch.fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _module(graph: torch.fx.Graph) -> torch.fx.GraphModule:
    graph.lint()  # type: ignore[no-untyped-call]
    return torch.fx.GraphModule(torch.nn.Module(), graph)


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
