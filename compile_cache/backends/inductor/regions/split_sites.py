"""Split a site by what its values depend on: a prologue of the time, and a site for the rest, each with its weights.

The rest is an ordinary site, whose function runs a part of the traced graph. So it is compiled, compared, kept on disk
and loaded like any other region; compared, that is, with the operators of the block's own code. The prologue runs by
these operators: reading its weights takes as long as its few kernels, and it would be one region more to compile.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from ....errors import first_line
from ....keys import Component, digest
from ....regions.dependence import TIME, Part, StaysWholeError, split
from ....regions.region_weights import weight_forms, weight_inputs, weight_slots
from ....regions.site import Dims, RegionSite
from ....regions.slots import tensor_slots
from ....regions.structure import parts
from ....regions.weight_parts import parts_of
from ....torch_facts.out_of_memory import is_out_of_memory
from ....torch_facts.private_names import pytree
from ..compile.shape_guards import ShapeGuards, Verdict
from ..compile.tracing import Shapes, Trace, bind_dims, general_hints, region_format, static_sizes, trace
from .numerics_check import other_values, run_original

logger = logging.getLogger(__name__)

_LEAST_SPARED = 0.1  # of a block's bytes: 0.2 gains in Flux, and Z-Image has 0.02


@dataclass(frozen=True, eq=False)
class SplitSite:
    """prologue: takes the block's `inputs` (indices), and returns a list of tensors. run_each: the prologue for each of
    several inputs.

    rest: takes all inputs of the block, then these results; it returns what the block returns.
    spared: modules inside the block, by name, whose weights only the prologue reads.
    """

    prologue: RegionSite
    run_each: Callable[[torch.nn.Module, Sequence[Sequence[torch.Tensor]]], list[list[torch.Tensor]]]
    inputs: tuple[int, ...]
    rest: RegionSite
    spared: frozenset[str]


@dataclass(frozen=True, eq=False)
class _PartOfBlock:
    """A part of the blocks of one structure. weights: indices into `weight_inputs` without the modules `without`.

    output_spec: of the block's result; None for a prologue, which returns a list.
    """

    name: str
    part: Part
    without: tuple[str, ...]
    weights: tuple[int, ...]
    dims: tuple[Dims, ...]
    output_spec: pytree.TreeSpec | None

    def site(self, whole: RegionSite) -> RegionSite:
        kind = f"{whole.kind}.{self.name}"
        structure = digest((whole.structure, kind, self.part.graph.code))
        return RegionSite(whole.name, kind, whole.module, self.run, self.dims, self.without, structure)

    def run(self, module: torch.nn.Module, *tensors: torch.Tensor) -> Any:
        """The function of the site."""
        (found,) = self.run_each(module, [tensors])
        return found

    def run_each(self, module: torch.nn.Module, several: Sequence[Sequence[torch.Tensor]]) -> list[Any]:
        """The results for each of several inputs; the weights are looked up once."""
        own = weight_inputs(weight_slots(module, self.without))
        weights, results = [own[index] for index in self.weights], []
        for tensors in several:
            given = [
                tensor.contiguous(memory_format=region_format(tensor, names))
                for tensor, names in zip(tensors, self.dims, strict=True)
            ]
            found = list(self.part.graph(*weights, *given))
            results.append(found if self.output_spec is None else pytree.tree_unflatten(found, self.output_spec))
        return results


@dataclass(frozen=True, eq=False)
class _SplitStructure:
    """One split of the blocks of a structure."""

    guards: ShapeGuards
    prologue: _PartOfBlock
    rest: _PartOfBlock
    spared: frozenset[str]

    def at(self, site: RegionSite) -> SplitSite:
        own = self.prologue
        return SplitSite(own.site(site), own.run_each, own.part.inputs, self.rest.site(site), self.spared)


@dataclass(eq=False)
class _Tried:
    """The split of a structure, None if there is none, and whether it serves a combination of sizes."""

    split: _SplitStructure | None
    serves: dict[Shapes, bool] = field(default_factory=dict)


class SplitSites:
    """The splits that this process has tried, by structure of a block. Callers hold the cache's lock."""

    def __init__(self) -> None:
        self._tried: dict[tuple[Any, ...], _Tried] = {}

    def of(
        self,
        site: RegionSite,
        tensors: Sequence[torch.Tensor],
        torch_flags: tuple[Component, ...] = (),
        loaded: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> SplitSite | None:
        """The split of a site for these inputs; None if it stays whole.

        A structure is traced once, for general sizes. At each new combination of sizes the parts run once beside the
        block's own code, inside `loaded()`, where the weights of the site are on the device; where they give other bits
        the block stays whole. Raises what the block or `loaded` raise by themselves.
        """
        if site.structure is None or TIME not in site.steady:
            return None
        slots = weight_slots(site.module, site.without)
        forms = (weight_forms(slots), tuple(weight.dtype for weight in weight_inputs(slots)))
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        kinds = tuple((tensor.dtype, tensor.device) for tensor in tensors)
        static = static_sizes(site.dims, shapes)
        key = (site.kind, site.structure, site.dims, site.steady, static, kinds, forms, torch_flags)
        sizes = bind_dims(site.dims, shapes)
        if sizes is None:
            return None
        tried = self._tried.get(key)
        if tried is None or shapes not in tried.serves:
            with loaded():
                if tried is None:
                    tried = self._tried[key] = _Tried(_try(site, tensors, sizes))
                tried.serves[shapes] = tried.split is not None and _serves(tried.split, site, tensors, sizes)
        return tried.split.at(site) if tried.split is not None and tried.serves[shapes] else None


def _try(site: RegionSite, tensors: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> _SplitStructure | None:
    hints, why = general_hints(sizes, tensors[0].device), ""
    for oblivious in (True, False):
        try:
            return _split(site, tensors, hints, oblivious)
        except StaysWholeError as error:
            why = str(error)
            break
        except Exception as error:
            if is_out_of_memory(error):
                raise
            why = why or first_line(error)
    logger.info("Resolute: %s streams whole: %s", site.kind, why)
    return None


def _split(
    site: RegionSite, tensors: Sequence[torch.Tensor], hints: Mapping[str, int], oblivious: bool
) -> _SplitStructure:
    traced = trace(site.function, site.module, tensors, site.dims, hints, oblivious, site.without, site.attends)
    owners = _owners(site.module, site.without)
    cut = split(traced.graph.graph, [owners[index] or None for index in traced.used_weights], site.steady)
    given = [site.dims[index] for index in cut.prologue.inputs]
    prologue = _part("prologue", cut.prologue, site, traced, owners, given, None)
    dims = [*site.dims, *[_dims(fake, traced) for fake in cut.results]]
    rest = _part("rest", cut.rest, site, traced, owners, dims, traced.output_spec)
    guards = ShapeGuards(traced.guards, traced.symbols)
    return _SplitStructure(guards, prologue, rest, frozenset(map(str, cut.groups)))


def _part(
    name: str,
    part: Part,
    site: RegionSite,
    traced: Trace,
    owners: Sequence[str],
    dims: Sequence[Dims],
    spec: pytree.TreeSpec | None,
) -> _PartOfBlock:
    read = [traced.used_weights[index] for index in part.weights]
    needed = {owners[index] for index in read}
    unused = {owner for owner in owners if not any(_is_within(other, owner) for other in needed)}
    without = tuple(sorted({*site.without, *unused}))
    left = [index for index, owner in enumerate(owners) if not any(_is_within(owner, each) for each in unused)]
    weights = tuple(left.index(index) for index in read)
    return _PartOfBlock(name, part, without, weights, tuple(dims), spec)


def _is_within(name: str, outer: str) -> bool:
    return name == outer or not outer or name.startswith(f"{outer}.")


def _owners(module: torch.nn.Module, without: Sequence[str]) -> list[str]:
    """For each of `weight_inputs`, the name of the module inside the block that has it. Raises StaysWholeError."""
    inside = parts(module, without)
    names = {id(own): name for name, part in inside for own, _ in tensor_slots(part)}
    slots = weight_slots(module, without)
    if len(slots) != sum(len(tensor_slots(part)) for _, part in inside):
        raise StaysWholeError("two of its modules share a weight")
    return [names[id(own)] for own, name in slots for _ in parts_of(own[name])]


def _dims(fake: torch.Tensor, traced: Trace) -> Dims:
    """The dimensions of what a prologue returns, by the names of the block's inputs."""
    names: dict[Any, str] = {}
    for name, symbol in traced.symbols.items():
        names.setdefault(traced.shape_env.replace(symbol), name)
    found: list[str | None] = []
    for size in fake.shape:
        if not isinstance(size, torch.SymInt):
            found.append(None)
        elif size.node.expr in names:
            found.append(names[size.node.expr])
        else:
            raise StaysWholeError(f"a prologue returns a tensor of {size} elements along a dimension")
    return tuple(found)


def _serves(
    structure: _SplitStructure, site: RegionSite, tensors: Sequence[torch.Tensor], sizes: Mapping[str, int]
) -> bool:
    """Check that the parts give the block's results, keep less than they spare, and spare enough.

    On a CPU bit for bit; on a GPU up to rounding, as compiled regions. False without the memory to find out. Raises
    what the block raises.
    """
    if structure.guards.check(sizes)[0] is Verdict.BROKEN:
        return False
    found = structure.at(site)
    try:
        expected = pytree.tree_leaves(run_original(site, tensors))
        with torch.no_grad():
            kept = found.prologue.function(site.module, *[tensors[index] for index in found.inputs])
            actual = pytree.tree_leaves(found.rest.function(site.module, *tensors, *kept))
    except Exception as error:  # noqa: BLE001 (what the block itself raises is raised below)
        if is_out_of_memory(error):
            return False
        run_original(site, tensors)
        logger.debug("Resolute: the parts of %s fail at %s: %s", site.kind, sizes, first_line(error))
        return False
    spared = [
        weight for name in found.spared for weight in weight_inputs(tensor_slots(site.module.get_submodule(name)))
    ]
    spared_bytes, every = sum(each.nbytes for each in spared), weight_inputs(weight_slots(site.module, site.without))
    if spared_bytes < max(sum(each.nbytes for each in kept), _LEAST_SPARED * sum(each.nbytes for each in every)):
        return False
    if why := other_values(actual, expected, tensors):
        logger.info("Resolute: the parts of %s give other values than the block: %s", site.kind, why)
    return not why
