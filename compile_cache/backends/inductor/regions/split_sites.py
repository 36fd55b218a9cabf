"""Split a site by data dependence: a prologue that depends on the time alone, and a site for the rest of the block.

The rest is an ordinary site whose function runs a part of the traced graph. So it is compiled, compared, stored and
loaded like any other region; the comparison runs the traced operators of the block's code. The prologue runs the
operators eagerly: reading its weights takes as long as its few kernels, and compiling it would add another region.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ....errors import first_line
from ....keys import Component, digest
from ....modules.dependence import CannotSplitError, Part, split
from ....modules.region_weights import weight_forms, weight_inputs, weight_slots
from ....modules.site import Dims, RegionSite
from ....modules.slots import tensor_slots
from ....modules.structure import parts
from ....modules.weight_parts import parts_of
from ....torch_compat.out_of_memory import is_out_of_memory
from ....torch_compat.private_names import pytree
from ..lower.shape_guards import ShapeGuards, Verdict
from ..lower.tracing import Shapes, Trace, bind_dims, general_hints, in_region_format, static_sizes, trace
from .numerics_check import run_original, value_difference

logger = logging.getLogger(__name__)

_RunEach = Callable[[torch.nn.Module, Sequence[Sequence[torch.Tensor]]], list[Any]]
_LEAST_PROLOGUE_ONLY = 0.1  # share of a block's weight bytes: Flux spares 0.2 and gains, Z-Image spares 0.02


@dataclass(frozen=True, eq=False)
class SplitSite:
    """prologue: `prologue(module, several)` returns a list of tensors for each entry of `several`, the values of the
    block's inputs `RegionSite.times` at one time.
    reads: names of modules inside the block whose weights the prologue reads. prologue_only: modules that only it
    reads. rest: takes all inputs of the block, then the prologue's results; it returns the block's result.
    """

    prologue: _RunEach
    reads: frozenset[str]
    prologue_only: frozenset[str]
    rest: RegionSite


@dataclass(frozen=True, eq=False)
class _SplitStructure:
    """The cached split of one block structure. found: a template without a module. serves: for each combination of
    input shapes, True if the parts compute the block's result.
    """

    guards: ShapeGuards
    found: SplitSite
    serves: dict[Shapes, bool] = field(default_factory=dict)

    def at(self, site: RegionSite) -> SplitSite:
        return replace(self.found, rest=replace(self.found.rest, name=site.name, module=site.module))


class SplitSites:
    """The splits that this process has tried, by block structure. Callers must hold the cache's lock."""

    def __init__(self) -> None:
        self._tried: dict[tuple[Any, ...], _SplitStructure | None] = {}

    def of(
        self,
        site: RegionSite,
        tensors: Sequence[torch.Tensor],
        torch_flags: tuple[Component, ...] = (),
        loaded: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> SplitSite | None:
        """The split of a site for these inputs; None if it stays whole.

        A structure is traced once, for general sizes. At each new combination of sizes the parts run once and are
        compared with the block's own code, inside `loaded()`, which loads the site's weights to the device; if their
        results differ, the block stays whole. Raises the errors of the block and of `loaded`.
        """
        if site.structure is None or not site.times:
            return None
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        sizes = bind_dims(site.dims, shapes)
        if sizes is None:
            return None
        slots = weight_slots(site.module, site.without)
        forms = (weight_forms(slots), tuple(weight.dtype for weight in weight_inputs(slots)))
        kinds = tuple((tensor.dtype, tensor.device) for tensor in tensors)
        static = static_sizes(site.dims, shapes)
        key = (site.kind, site.structure, site.dims, site.times, static, kinds, forms, torch_flags)
        if key not in self._tried:
            with loaded():
                self._tried[key] = _try(site, tensors, sizes)
        found = self._tried[key]
        if found is None:
            return None
        if shapes not in found.serves:
            with loaded():
                found.serves[shapes] = _serves(found, site, tensors, sizes)
        return found.at(site) if found.serves[shapes] else None


def _try(site: RegionSite, tensors: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> _SplitStructure | None:
    hints, why = general_hints(sizes, tensors[0].device), ""
    for oblivious in (True, False):
        try:
            return _split(site, tensors, hints, oblivious)
        except CannotSplitError as error:
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
    owners, weights = _owners(site.module, site.without), weight_inputs(weight_slots(site.module, site.without))
    cut = split(traced.graph.graph, len(traced.used_weights), site.times)
    needed, reads = ({owners[traced.used_weights[n]] for n in part.weights} for part in (cut.rest, cut.prologue))
    prologue_only = reads - needed - {""}
    prologue_only_bytes = sum(
        weight.nbytes for owner, weight in zip(owners, weights, strict=True) if owner in prologue_only
    )
    if not prologue_only or prologue_only_bytes < _LEAST_PROLOGUE_ONLY * sum(weight.nbytes for weight in weights):
        raise CannotSplitError("too few of its weights serve the time alone")

    def computing(part: Part, dims: Sequence[Dims], spec: pytree.TreeSpec) -> _RunEach:
        return _computing(part.graph, [traced.used_weights[n] for n in part.weights], site.without, dims, spec)

    dims = (*site.dims, *[_dims(fake, traced) for fake in cut.results])
    times = [site.dims[index] for index in site.times]
    prologue = computing(cut.prologue, times, pytree.tree_structure(list(cut.results)))
    run_each = computing(cut.rest, dims, traced.output_spec)
    rest = RegionSite(
        name="",
        kind=f"{site.kind}.rest",
        module=torch.nn.Module(),
        function=lambda module, *tensors: run_each(module, [tensors])[0],
        dims=dims,
        without=(*site.without, *sorted(prologue_only)),
        structure=digest((site.structure, site.kind, cut.rest.graph.code)),
    )
    found = SplitSite(prologue, frozenset(reads), frozenset(prologue_only), rest)
    return _SplitStructure(ShapeGuards(traced.guards, traced.symbols), found)


def _computing(
    graph: torch.fx.GraphModule, numbers: Sequence[int], without: Sequence[str], dims: Sequence[Dims], spec: Any
) -> _RunEach:
    """A function that runs a part on several inputs and keeps no block alive. numbers: indices into `weight_inputs`."""

    def run_each(module: torch.nn.Module, several: Sequence[Sequence[torch.Tensor]]) -> list[Any]:
        own = weight_inputs(weight_slots(module, without))
        weights, results = [own[number] for number in numbers], []
        for tensors in several:
            inputs = [in_region_format(tensor, names) for tensor, names in zip(tensors, dims, strict=True)]
            results.append(pytree.tree_unflatten(list(graph(*weights, *inputs)), spec))
        return results

    return run_each


def _owners(module: torch.nn.Module, without: Sequence[str]) -> list[str]:
    """For each of `weight_inputs`, the name of its module in the block. Raises CannotSplitError if two share one."""
    inside = parts(module, without)
    names = {id(own): name for name, part in inside for own, _ in tensor_slots(part)}
    slots = weight_slots(module, without)
    if len(slots) != sum(len(tensor_slots(part)) for _, part in inside):
        raise CannotSplitError("two of its modules share a weight")
    return [names[id(own)] for own, name in slots for _ in parts_of(own[name])]


def _dims(fake: torch.Tensor, traced: Trace) -> Dims:
    """The dimensions of a prologue's result, in the names of the block's inputs. Raises KeyError for any other size."""
    names = {traced.shape_env.replace(symbol): name for name, symbol in reversed(traced.symbols.items())}
    return tuple(names[size.node.expr] if isinstance(size, torch.SymInt) else None for size in fake.shape)


def _serves(
    structure: _SplitStructure, site: RegionSite, tensors: Sequence[torch.Tensor], sizes: Mapping[str, int]
) -> bool:
    """True if the parts compute the block's results: bit for bit on a CPU, on a GPU up to rounding like compiled code.

    False if memory does not suffice to compare. Raises the block's own errors.
    """
    if structure.guards.check(sizes)[0] is Verdict.BROKEN:
        return False
    found = structure.at(site)
    try:
        expected = pytree.tree_leaves(run_original(site, tensors))
        with torch.no_grad():
            (kept,) = found.prologue(site.module, [[tensors[index] for index in site.times]])
            actual = pytree.tree_leaves(found.rest.function(site.module, *tensors, *kept))
    except Exception as error:  # noqa: BLE001 (the block's own errors are raised below)
        if is_out_of_memory(error):
            return False
        run_original(site, tensors)
        return False
    if why := value_difference(actual, expected, tensors):
        logger.info("Resolute: the parts of %s give other values than the block: %s", site.kind, why)
    return not why
