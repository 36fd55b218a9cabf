"""Cuts the forward of a block into shares, at code that no region can run: a routed part, or another node's patch.

A routed part picks tokens by their values, as a mixture of experts does; neither a trace nor a capture can follow that.
It runs eagerly, like a patch, and the shares around it are regions. Each share runs core's own forward of the block
from its beginning, so no code of core is copied here. The results of earlier shares and of the code between them are
substituted, and the forward ends at the next cut. A trace drops recomputed operations that its result does not need.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .....compile_cache.modules.slots import swapped
from .....compile_cache.torch_compat.private_names import pytree
from .catalogue import is_routed
from .options import BlockOptions

# Names of the extra arguments of a share, besides the block's own.
ANSWERS = "answers of the code at the cuts before"
RESULTS = "results of the parts before"


class Stop(NamedTuple):
    """The cut at the end of a share; the last share has none.

    place: the name of a routed part, or the kind of a patch and its number. kept: names of the parts whose results the
    next shares need. layout: the structure of the cut's arguments and of these results.
    """

    place: str | tuple[str, int]
    kept: tuple[str, ...]
    layout: tuple[Any, ...]

    def arguments_at_cut(
        self, tensors: Sequence[torch.Tensor], options: Mapping[str, Any]
    ) -> tuple[Any, Any, list[Any]]:
        """The cut's positional and keyword arguments, and the kept results. options: of the block's call."""
        spec, inner, kinds, places = self.layout
        left = iter(tensors)
        flat = [next(left) if kind is torch.Tensor else len(next(left)) if kind is int else kind for kind in kinds]
        leaves = pytree.tree_unflatten(flat, inner)
        for place in places:
            leaves[place] = {**options, **leaves[place]}
        found: tuple[Any, Any, list[Any]] = pytree.tree_unflatten(leaves, spec)
        return found


def _flattened(given: Any) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    """Tensors and the `Stop.layout`. An integer is passed as an empty tensor: in a trace it may be a symbol."""
    leaves, spec = pytree.tree_flatten(given)
    places = tuple(place for place, leaf in enumerate(leaves) if isinstance(leaf, BlockOptions))
    flat, inner = pytree.tree_flatten([leaf.own if isinstance(leaf, BlockOptions) else leaf for leaf in leaves])
    kinds = [torch.Tensor if isinstance(leaf, torch.Tensor) else _number_or(leaf) for leaf in flat]
    moved = [(leaf, kind) for leaf, kind in zip(flat, kinds, strict=True) if kind in (torch.Tensor, int)]
    tensors = [leaf if kind is torch.Tensor else moved[0][0].new_empty((leaf, 0)) for leaf, kind in moved]
    return tensors, (spec, inner, tuple(kinds), places)


def _number_or(leaf: Any) -> Any:
    return int if type(leaf) in (int, torch.SymInt) else leaf


class _StoppedAt(Exception):
    def __init__(self, place: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__("reached a cut")
        self.place, self.args_and_names = place, (args, dict(kwargs))


def routed_part(block: torch.nn.Module) -> str:
    """The name of the only routed part of a block; empty for a block with none or several."""
    found = [name for name, part in block.named_modules() if is_routed(type(part))]
    return found[0] if len(found) == 1 else ""


class Share:
    """One run of a block's forward, up to the first cut that has no answer.

    stop: after the run, the cut that ended it; None if the forward ran to its end.
    """

    def __init__(self, answers: Sequence[Any], results: Mapping[str, Any], kept: Sequence[str] | None = None) -> None:
        """kept: see `Stop`. None: the run determines these parts."""
        self._answers, self._results, self._kept, self._known = list(answers), dict(results), kept, frozenset(results)
        self._results_so_far: dict[str, list[Any]] = {}
        self._called, self._ran = set[str](), set[str]()
        self.stop: Stop | None = None

    def at_cut(self, place: Any, *args: Any, **kwargs: Any) -> Any:
        """Called in place of the code at a cut: returns its next answer, or ends the forward."""
        if self._answers:
            return self._answers.pop(0)
        raise _StoppedAt(place, args, kwargs)

    def run(self, block: torch.nn.Module, forward: Callable[[], Any]) -> Any:
        """Run `forward`, the block's. Returns its result, or at a cut the tensors for `Stop.arguments_at_cut`."""
        routed, parts = routed_part(block), [(name, part) for name, part in block.named_modules() if name]
        needed = None if self._kept is None else {*self._kept, *self._known, routed}
        swaps = [
            (vars(part), "forward", functools.partial(self._run_part, name, part.forward, name == routed))
            for name, part in parts
            if needed is None or name in needed
        ]
        try:
            with swapped(swaps):
                return forward()
        except _StoppedAt as reached:
            kept = [name for name, part in parts if self._is_kept(name, part)]
            tensors, layout = _flattened((*reached.args_and_names, [self._results_so_far[name][0] for name in kept]))
            self.stop = Stop(reached.place, tuple(kept), layout)
            return tensors

    def _run_part(self, name: str, forward: Callable[..., Any], is_routed: bool, *args: Any, **kwargs: Any) -> Any:
        self._called.add(name)
        if name in self._results:
            return self._results.pop(name)
        if is_routed:
            return self.at_cut(name, *args, **kwargs)
        result = forward(*args, **kwargs)
        self._ran.add(name)
        if all(isinstance(each, torch.Tensor) for each in pytree.tree_leaves(result)):
            self._results_so_far = {
                one: each for one, each in self._results_so_far.items() if not one.startswith(f"{name}.")
            }
            # Clone, since the block may write into the result.
            self._results_so_far.setdefault(name, []).append(pytree.tree_map(torch.clone, result))
        return result

    def _is_kept(self, name: str, part: torch.nn.Module) -> bool:
        """Keep the result of a part that has a matrix and ran exactly once; the next share reruns other parts."""
        if self._kept is not None:
            return name in self._kept and name in self._results_so_far
        has_matrix = any(weight.ndim > 1 for weight in part.parameters())
        return has_matrix and name not in self._known and len(self._results_so_far.get(name, ())) == 1

    def idle(self, block: torch.nn.Module) -> tuple[str, ...]:
        """Names of parts that did not run and contain none that ran. The innermost part that ran around one must call
        parts: otherwise it may read their weights itself.
        """

        def is_idle(name: str) -> bool:
            if any(f"{ran}.".startswith(f"{name}.") for ran in self._ran):
                return False
            around = max((ran for ran in self._ran if name.startswith(f"{ran}.")), key=len, default=None)
            return around is None or any(called.startswith(f"{around}.") for called in self._called)

        return tuple(name for name, _ in block.named_modules() if name and is_idle(name))
