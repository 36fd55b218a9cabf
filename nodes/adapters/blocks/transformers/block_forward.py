"""The forward of one recognised block: it finds the region for the arguments of a call, and runs it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .....compile_cache.attention.chooser import of_the_blocks
from .....compile_cache.errors import BypassCode, BypassReason
from .....compile_cache.keys import repr_digest
from .....compile_cache.regions.site import Bypass, RegionFunction, RegionRunner, RegionSite
from .....compile_cache.regions.structure import TORCH_OWN
from ...comfyui import chosen_attention
from ...comfyui.module_attributes import ATTRIBUTES
from ...comfyui.transformer_options import OVERRIDE
from ..common import UnusableArgumentError, original
from .arguments import Arguments, Layout, dims_of, put_together, shared_by_batch, take_apart
from .catalogue import shared_arguments, time_arguments
from .experts import Cut, cut_of, pass_by
from .options import BlockOptions, Reads, RefusedOptionError, fits
from .traced import (
    MADE,
    OPTIONS,
    POSITION,
    RESULTS,
    call_original,
    copied_back,
    run_after_routed,
    run_before_routed,
    run_block,
)

# More layouts than this of one kind of block mean that a plain value changes from call to call.
_MOST_LAYOUTS = 16


@dataclass(eq=False)
class _Call:
    """One kind of call of a block: what it reads of transformer_options, and why no region may serve it, if so.

    written: numbers of the tensors that the block writes to.
    """

    reads: Reads
    written: tuple[int, ...] = ()
    refused: BypassReason | None = None


@dataclass(eq=False)
class _Learned:
    """The calls so far of all blocks of one structure, in the whole process.

    calls: by layout of the arguments. shared: by layout, see `arguments.dims_of`.
    """

    calls: dict[Layout, list[_Call]] = field(default_factory=dict)
    shared: dict[Layout, frozenset[int]] = field(default_factory=dict)


@functools.cache
def _learned(structure: str) -> _Learned:
    return _Learned()


class RecognisedBlock:
    """Stands in for the forward of one block."""

    def __init__(self, name: str, block: torch.nn.Module, run: RegionRunner, bypass: Bypass, structure: str) -> None:
        """structure: a digest of the block, equal for blocks that can share regions."""
        self._name = name
        self._block = block
        self._kind = type(block).__name__
        self._run = run
        self._bypass = bypass
        self._structure = structure
        self._learned = _learned(structure)
        self._names = _parameters_of(type(block))
        self._shared_arguments = shared_arguments(block)
        self._time_arguments = time_arguments(block)
        self._cut = cut_of(block)
        self._sites: dict[tuple[Any, ...], RegionSite] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            given = self._by_name(args, kwargs)
            passes_options = OPTIONS in given or OPTIONS in self._names
            options = given.pop(OPTIONS, None) or {}
            arguments = take_apart(given)
            call = self._call(arguments, options, passes_options)
            if self._cut is None:
                result, written = self._run(self._site(arguments, call, passes_options), *arguments.inputs())
            else:
                result, written = self._run_apart(self._cut, given, call, passes_options), ()
        except UnusableArgumentError as error:
            self._bypass(BypassReason(BypassCode.OBSERVED_INPUT, f"{self._kind}: {error}; such blocks run eagerly"))
        except RefusedOptionError as error:
            self._bypass(error.reason)
        else:
            return copied_back(result, written, [arguments.tensors[number] for number in call.written])
        return original(self._block, *args, **kwargs)

    def _run_apart(self, cut: Cut, given: Mapping[str, Any], call: _Call, passes_options: bool) -> Any:
        """Two regions, and the routed part between them. Raises UnusableArgumentError."""
        if call.written:
            raise UnusableArgumentError("it writes to its inputs")
        arguments = take_apart(given)
        results, x = self._run(self._site(arguments, call, passes_options, "enter"), *arguments.inputs())
        made = self._block.get_submodule(cut.part)(x)
        arguments = take_apart({**given, RESULTS: results, MADE: made})
        return self._run(self._site(arguments, call, passes_options, "exit"), *arguments.inputs())

    def _by_name(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments in one order, however the call gives them."""
        names = [*self._names, *[f"{POSITION}{n}" for n in range(len(self._names), len(args))]]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return {name: given[name] for name in (*names, *sorted(given.keys() - set(names))) if name in given}

    def _call(self, arguments: Arguments, options: Mapping[str, Any], passes_options: bool) -> _Call:
        """The known kind of call that this one is, or a new one. Raises RefusedOptionError."""
        calls = self._learned.calls.get(arguments.layout)
        if calls is None:
            if len(self._learned.calls) >= _MOST_LAYOUTS:
                raise UnusableArgumentError("it is called with ever new plain values")
            calls = self._learned.calls.setdefault(arguments.layout, [])
        found = next((call for call in calls if fits(options, call.reads)), None)
        if found is None:
            found = self._try(arguments, options, passes_options)
            calls.append(found)
        if found.refused is not None:
            raise RefusedOptionError(found.refused)
        return found

    def _try(self, arguments: Arguments, options: Mapping[str, Any], passes_options: bool) -> _Call:
        """Run the block's own code on copies, to see what it reads and whether it changes more than its tensors."""
        reads: Reads = {}
        copies = [tensor.clone() for tensor in arguments.inputs()]
        given = put_together(arguments.layout, copies)
        attributes = _attributes(self._block)
        extra = {OPTIONS: BlockOptions(self._kind, reads, options)} if passes_options else {}
        forward = functools.partial(call_original, self._block, {**given, **extra})
        try:
            with of_the_blocks():  # to measure kernels can wait for compiled code: a second in a first prompt
                if self._cut is None:
                    forward()
                else:
                    pass_by(self._block, self._cut, forward)
            after = take_apart(given)
        except RefusedOptionError as error:
            return _Call(reads, refused=error.reason)
        what = ""
        if (OVERRIDE,) not in reads and chosen_attention.default() != chosen_attention.TORCHS:
            what = "may call the attention of a start option, which no trace can follow"
        if after.layout != arguments.layout or any(a is not b for a, b in zip(after.tensors, copies, strict=False)):
            what = "changes a list or a dict of its caller's"
        elif _attributes(self._block) != attributes:
            what = "keeps something from call to call"
        if not what:
            tensors = enumerate(zip(arguments.tensors, copies, strict=False))
            return _Call(reads, tuple(number for number, (before, after) in tensors if not torch.equal(before, after)))
        text = f"{self._kind} {what}; such blocks run eagerly"
        return _Call(reads, refused=BypassReason(BypassCode.OBSERVED_INPUT, text))

    def _site(self, arguments: Arguments, call: _Call, passes_options: bool, share: str = "") -> RegionSite:
        """share: "enter" or "exit" for one region of a block that is cut, else the whole block."""
        layout = arguments.layout
        shared = self._learned.shared.get(layout)
        if shared is None:
            shared = frozenset(n for n, name in enumerate(arguments.names) if name in self._shared_arguments)
        shared = self._learned.shared[layout] = shared | shared_by_batch(arguments)
        dims = dims_of(arguments, shared)
        key = (layout, dims, id(call), share)
        site = self._sites.get(key)
        if site is None:
            structure = repr_digest((self._structure, layout, sorted(call.reads.items()), call.written))
            reads = call.reads if passes_options else None
            kind = f"{self._kind}.{share}" if share else self._kind
            function, without = self._function(layout, reads, call.written, share)
            times = self._times(arguments, call) if not share else ()
            site = RegionSite(self._name, kind, self._block, function, dims, without, structure, times=times)
            self._sites[key] = site
        return site

    def _times(self, arguments: Arguments, call: _Call) -> tuple[int, ...]:
        """See `RegionSite.times`. A time for each token or frame is as long as the picture, so it stays with it."""
        named = [number for number, name in enumerate(arguments.names) if name in self._time_arguments]
        found = tuple(number for number in named if number not in call.written)
        times = [arguments.tensors[number] for number in found]
        return found if all(each.ndim == 2 or (each.ndim == 3 and each.shape[1] == 1) for each in times) else ()

    def _function(
        self, layout: Layout, reads: Reads | None, written: Sequence[int], share: str
    ) -> tuple[RegionFunction, tuple[str, ...]]:
        """The function of a site, and the modules inside the block that it does not run."""
        if self._cut is None or not share:
            return functools.partial(run_block, layout, self._kind, reads, written), ()
        if share == "enter":
            return functools.partial(run_before_routed, layout, self._kind, reads, self._cut), self._cut.outside_before
        return functools.partial(run_after_routed, layout, self._kind, reads, self._cut), self._cut.outside_after


def _parameters_of(kind: type[torch.nn.Module]) -> tuple[str, ...]:
    """The names of the parameters of a class's forward that may be given by position."""
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters):
        return ()
    return tuple(each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _attributes(block: torch.nn.Module) -> list[tuple[str, int]]:
    """The attributes of a block's modules, without those of torch and of ComfyUI's bookkeeping."""
    return [
        (name, id(value))
        for part in block.modules()
        for name, value in vars(part).items()
        if name not in TORCH_OWN and not ATTRIBUTES.is_bookkeeping(name)
    ]
