"""A block in which other code runs: a routed part, or another node's patch. Its forward is cut there, into shares.

A routed part picks tokens by their values, as a mixture of experts does; neither a trace nor a capture can follow that.
It runs eagerly, as a patch does, and the shares around it are regions. Each share runs core's own forward of the block
from its beginning, so nothing of core is copied here. What earlier shares and the code between them gave is put in its
place, and at the next cut the forward ends. Of what it computes once more, a trace keeps what the result needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .....compile_cache.regions.slots import swapped
from ..common import UnusableArgumentError
from .arguments import Layout, take_apart_result
from .catalogue import is_routed

# What a share gets beside the block's arguments.
ANSWERS = "answers of the code at the cuts before"
RESULTS = "results of the parts before"

Place = str | tuple[str, int]  # the name of a routed part, or the kind of a patch and its number


@dataclass(frozen=True)
class Stop:
    """How a share ends that is not the last. layout: of the arguments at the cut, and of the results in `kept`.

    kept: names of the parts whose results the next shares need.
    """

    place: Place
    layout: Layout
    kept: tuple[str, ...]


class _StoppedAt(Exception):
    def __init__(self, place: Place, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__("reached a cut")
        self.place, self.given = place, {"args": args, "kwargs": dict(kwargs)}


def routed_part(block: torch.nn.Module) -> str:
    """The name of the routed part of a block; empty for a block without one, and for one with more."""
    found = [name for name, part in block.named_modules() if is_routed(type(part))]
    return found[0] if len(found) == 1 else ""


class Share:
    """One run of a block's forward, up to the first cut that has no answer.

    stop: the end, afterwards; None if the forward ran to its own. idle: parts of the block that it did not run.
    """

    def __init__(self, answers: Sequence[Any], results: Mapping[str, Any], kept: Sequence[str] | None = None) -> None:
        """kept: see `Stop`; None: find out which parts these are."""
        self._answers, self._results, self._kept = list(answers), dict(results), kept
        self._noted: dict[str, list[tuple[Any, list[torch.Tensor]]]] = {}
        self._before, self._called, self._ran = frozenset(results), set[str](), set[str]()
        self.stop: Stop | None = None
        self.idle: tuple[str, ...] = ()

    def meet(self, place: Place, *args: Any, **kwargs: Any) -> Any:
        """Called in place of the code at a cut."""
        if self._answers:
            return self._answers.pop(0)
        raise _StoppedAt(place, args, kwargs)

    def run(self, block: torch.nn.Module, forward: Callable[[], Any]) -> Any:
        """The result of `forward`, which is the block's, or the tensors of `stop.layout` at the cut."""
        routed = routed_part(block)
        parts = [(name, part) for name, part in block.named_modules() if name]
        needed = None if self._kept is None else {*self._kept, *self._results, routed}
        swaps = [
            (vars(part), "forward", functools.partial(self._run_part, name, part.forward, name == routed))
            for name, part in parts
            if needed is None or name in needed
        ]
        try:
            with swapped(swaps):
                return forward()
        except _StoppedAt as reached:
            if self._kept is None:
                self._kept = [name for name, part in parts if name in self._noted and self._is_kept(name, part)]
            if not set(self._kept) <= self._noted.keys():
                raise UnusableArgumentError("it does not call its parts in the same order every time") from None
            given = {**reached.given, "kept": {name: self._noted[name][0][0] for name in self._kept}}
            tensors: list[torch.Tensor] = []
            self.stop = Stop(reached.place, take_apart_result(given, tensors), tuple(self._kept))
            return tensors
        finally:
            self.idle = tuple(name for name, _ in parts if self._is_idle(name))

    def _run_part(self, name: str, forward: Callable[..., Any], is_routed: bool, *args: Any, **kwargs: Any) -> Any:
        self._called.add(name)
        if name in self._results:
            return self._results.pop(name)
        if is_routed:
            return self.meet(name, *args, **kwargs)
        self._ran.add(name)
        result = forward(*args, **kwargs)
        for inner in [each for each in self._noted if each.startswith(f"{name}.")]:
            del self._noted[inner]
        self._noted.setdefault(name, []).append((result, self._copies(result)))
        return result

    def _copies(self, result: Any) -> list[torch.Tensor]:
        return [each.clone() for each in _tensors(result)] if self._kept is None else []

    def _is_idle(self, name: str) -> bool:
        """The part did not run, nor one in it, nor one around it that calls no part and so may read its weights."""
        if any(f"{ran}.".startswith(f"{name}.") for ran in self._ran):
            return False
        around = max((ran for ran in self._ran if name.startswith(f"{ran}.")), key=len, default=None)
        return around is None or any(called.startswith(f"{around}.") for called in self._called)

    def _is_kept(self, name: str, part: torch.nn.Module) -> bool:
        """The part is worth it, ran once, and what it gave is as it was: else the next share runs it again."""
        if (
            name in self._before
            or len(self._noted[name]) > 1
            or not any(weight.ndim > 1 for weight in part.parameters())
        ):
            return False
        result, copies = self._noted[name][0]
        return all(map(torch.equal, _tensors(result), copies))


def _tensors(result: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    take_apart_result(result, tensors)
    return tensors
