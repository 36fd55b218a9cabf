"""The forward of one recognised block: it selects the region for the arguments of a call, and runs it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .....compile_cache.attention.chooser import eager_attention
from .....compile_cache.errors import BypassCode, BypassReason, StillMissingError
from .....compile_cache.keys import repr_digest
from .....compile_cache.modules.site import Bypass, RegionRunner, RegionSite
from .....compile_cache.modules.structure import TORCH_OWN
from .....compile_cache.torch_compat.private_names import pytree
from ...comfyui import chosen_attention
from ...comfyui.module_attributes import ATTRIBUTES
from ...comfyui.transformer_options import OVERRIDE, PATCHES
from ..common import UnusableArgumentError, original
from .arguments import Arguments, Layout, dims_of, flatten, rebuild, shared_by_batch
from .catalogue import is_catalogued, optional_defaults_of, shared_arguments, time_arguments
from .options import BlockOptions, Reads, RefusedOptionError, fits, replaying_patches
from .shares import ANSWERS, RESULTS, Share, Stop, routed_part
from .traced import OPTIONS, POSITION, call_original, copied_back, run_block

logger = logging.getLogger(__name__)

# With more layouts than this for one kind of block, some plain value changes from call to call.
_MOST_LAYOUTS = 16


@dataclass(eq=False)
class _Call:
    """One kind of call of a block.

    reads: the options that the block looks up. written: indices of the tensors that the block writes to. stop: the cut
    that ends its share. idle: parts that the share does not run. broadcastable: indices of the tensors that may have
    one row for the whole batch or one for each picture. refused: why no region may serve the call.
    """

    reads: Reads
    written: tuple[int, ...] = ()
    stop: Stop | None = None
    idle: tuple[str, ...] = ()
    broadcastable: frozenset[int] = frozenset()
    refused: BypassReason | None = None


@dataclass(eq=False)
class _Learned:
    """The kinds of calls seen so far in this process, for all blocks of one structure.

    calls: by layout of the arguments. shared: by layout, see `arguments.dims_of`.
    """

    calls: dict[Layout, list[_Call]] = field(default_factory=dict)
    shared: dict[Layout, frozenset[int]] = field(default_factory=dict)


@functools.cache
def _learned(structure: str) -> _Learned:
    return _Learned()


class RecognisedBlock:
    """Replaces the forward of one block."""

    def __init__(self, name: str, block: torch.nn.Module, run: RegionRunner, bypass: Bypass, structure: str) -> None:
        """structure: a digest of the block. Blocks with equal digests can share regions."""
        self._name = name
        self._block = block
        self._kind = type(block).__name__
        self._run = run
        self._bypass = bypass
        self._structure = structure
        self._learned = _learned(structure)
        self._names, self._defaults = _parameters_of(type(block))
        self._optional_defaults = optional_defaults_of(block)
        self._shared_arguments = shared_arguments(block)
        self._time_arguments = time_arguments(block)
        self._sites: dict[tuple[Any, ...], RegionSite] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answers: list[Any] = []
        try:
            given = self._by_name(args, kwargs)
            passes_options = OPTIONS in given or OPTIONS in self._names
            options = given.pop(OPTIONS, None) or {}
            return self._run_shares(given, options, passes_options, answers)
        except UnusableArgumentError as error:
            self._bypass(BypassReason(BypassCode.OBSERVED_INPUT, f"{self._kind}: {error}; such blocks run eagerly"))
        except RefusedOptionError as error:
            self._bypass(error.reason)
        except StillMissingError:  # the block's original, below
            pass
        if answers and not routed_part(self._block):  # a patch ran and may have changed its own state
            return call_original(self._block, {**given, OPTIONS: replaying_patches(options, answers)})
        return original(self._block, *args, **kwargs)

    def _run_shares(
        self, given: Mapping[str, Any], options: Mapping[str, Any], passes_options: bool, answers: list[Any]
    ) -> Any:
        """Run a region for each share of the block, and the code at each cut; append its results to `answers`."""
        results: dict[str, Any] = {}
        while True:
            arguments = flatten({**given, ANSWERS: answers, RESULTS: results} if answers else given)
            call = self._call(arguments, options, passes_options)
            site = self._site(arguments, call, passes_options, len(answers))
            result, written = self._run(site, *arguments.inputs())
            if call.stop is None:
                return copied_back(result, written, [arguments.tensors[number] for number in call.written])
            args, kwargs, kept = call.stop.arguments_at_cut(result, options)
            results.update(zip(call.stop.kept, kept, strict=True))
            where = call.stop.place
            code = self._block.get_submodule(where) if isinstance(where, str) else options[PATCHES][where[0]][where[1]]
            answers.append(code(*args, **kwargs))

    def _by_name(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name, in one order for every way of passing them, without those equal to their defaults."""
        names = [*self._names, *[f"{POSITION}{n}" for n in range(len(self._names), len(args))]]
        given = {**self._optional_defaults, **dict(zip(names, args, strict=False)), **kwargs}
        ordered = [name for name in (*names, *sorted(given.keys() - set(names))) if name in given]
        return {name: given[name] for name in ordered if given[name] is not self._defaults.get(name, given)}

    def _call(self, arguments: Arguments, options: Mapping[str, Any], passes_options: bool) -> _Call:
        """The known kind of this call, or a new one. Raises RefusedOptionError or UnusableArgumentError."""
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
        """Run the block's own code on copies, to record its reads and to detect changes of anything but its tensors."""
        reads: Reads = {}
        copies = [tensor.clone() for tensor in arguments.inputs()]
        given = rebuild(arguments.layout, copies)
        attributes = _attributes(self._block)
        share = Share(given.get(ANSWERS, ()), given.get(RESULTS, {}))
        extra = {OPTIONS: BlockOptions(self._kind, reads, options, at_cut=share.at_cut)} if passes_options else {}
        own = {name: value for name, value in given.items() if name not in (ANSWERS, RESULTS)}
        try:
            with eager_attention():  # autotune attention later, in compiled code: it costs a first prompt a second
                share.run(self._block, functools.partial(call_original, self._block, {**own, **extra}))
            after = flatten(given)
        except RefusedOptionError as error:
            return _Call(reads, refused=error.reason)
        what = ""
        if share.stop is None and (OVERRIDE,) not in reads and chosen_attention.default() != chosen_attention.TORCHS:
            what = "may call the attention of a start option, which no trace can follow"
        if after.layout != arguments.layout or any(a is not b for a, b in zip(after.tensors, copies, strict=False)):
            what = "changes a list or a dict of its caller's"
        elif _attributes(self._block) != attributes:
            what = "keeps something from call to call"
        if not what:
            tensors = enumerate(zip(arguments.tensors, copies, strict=False))
            written = tuple(number for number, (before, after) in tensors if not torch.equal(before, after))
            if share.stop or ANSWERS in given:
                return _Call(reads, written, share.stop, share.idle(self._block))
            return _Call(
                reads, written, broadcastable=self._probe_broadcast(arguments, options, passes_options, written)
            )
        text = f"{self._kind} {what}; such blocks run eagerly"
        return _Call(reads, refused=BypassReason(BypassCode.OBSERVED_INPUT, text))

    def _probe_broadcast(
        self, arguments: Arguments, options: Mapping[str, Any], passes_options: bool, written: tuple[int, ...]
    ) -> frozenset[int]:
        """See `_Call.broadcastable`. At batch 1, one row for all looks like a row for each, so the block's own code
        runs at batch 2. Empty for a catalogued block, whose shared arguments are known.
        """
        if is_catalogued(type(self._block)):
            return frozenset()

        def results(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            copies = [each.clone() for each in inputs]
            given = rebuild(arguments.layout, copies)
            extra = {OPTIONS: BlockOptions(self._kind, {}, options)} if passes_options else {}
            with eager_attention():
                made = pytree.tree_leaves(call_original(self._block, {**given, **extra}))
            return [*made, *(copies[number] for number in written)]

        broadcastable = set()
        try:
            inputs, batch = arguments.inputs(), len(arguments.tensors[0])
            found = [n for n, each in enumerate(arguments.tensors) if n and each.ndim and len(each) in (1, batch)]
            count = max(batch, 2)
            whole = [each[:1].repeat_interleave(count, 0) if n in found else each for n, each in enumerate(inputs)]
            whole[0] = torch.cat([inputs[0], inputs[0].flip(-1)]) if batch == 1 else inputs[0]
            expected = results(whole)
            for n in found if expected else ():
                with contextlib.suppress(Exception):  # the block does not accept one row for the batch
                    pairs = zip(results([*whole[:n], inputs[n][:1], *whole[n + 1 :]]), expected, strict=True)
                    if all(itertools.starmap(_is_close, pairs)):
                        broadcastable.add(n)
        except Exception as error:  # a block that fails at another batch says nothing about this call
            logger.debug("Resolute: %s does not run at batch 2", self._kind, exc_info=error)
        return frozenset(broadcastable)

    def _site(self, arguments: Arguments, call: _Call, passes_options: bool, cuts: int) -> RegionSite:
        """The site of this share of the block. cuts: how many cuts precede it. Raises UnusableArgumentError."""
        layout = arguments.layout
        known = self._learned.shared.get(layout)
        named = frozenset(n for n, name in enumerate(arguments.names) if name in self._shared_arguments)
        shared = named if known is None else known
        new = shared_by_batch(arguments) - call.broadcastable - shared
        if new and known is not None:
            names = sorted({arguments.names[number] for number in new})
            logger.info("Resolute: %s compiles again, because a batch shares its %s", self._kind, ", ".join(names))
        shared = self._learned.shared[layout] = shared | new
        if any(len(arguments.tensors[n]) not in (1, len(arguments.tensors[0])) for n in call.broadcastable):
            raise UnusableArgumentError("it gets arguments of other batches")
        dims = dims_of(arguments, shared)
        key = (layout, dims, id(call))
        site = self._sites.get(key)
        if site is None:
            structure = repr_digest(
                (
                    self._structure,
                    layout,
                    sorted(call.reads.items()),
                    call.written,
                    call.stop,
                    sorted(call.broadcastable),
                )
            )
            reads = call.reads if passes_options else None
            share = ("between" if cuts else "enter") if call.stop else "exit" if cuts else ""
            kind = f"{self._kind}.{share}" if share else self._kind
            function = functools.partial(
                run_block, layout, self._kind, reads, call.written, call.stop, call.broadcastable
            )
            times = self._times(arguments, call) if not share else ()
            about = (self._name, kind, self._block, function, dims, call.idle, structure)
            site = RegionSite(*about, times=times, begins_block=share == "enter")
            self._sites[key] = site
        return site

    def _times(self, arguments: Arguments, call: _Call) -> tuple[int, ...]:
        """See `RegionSite.times`. Empty if a time differs by token or frame: its size then follows the picture's."""
        named = [number for number, name in enumerate(arguments.names) if name in self._time_arguments]
        found = tuple(number for number in named if number not in call.written)
        times = [arguments.tensors[number] for number in found]
        return found if all(each.ndim == 2 or (each.ndim == 3 and each.shape[1] == 1) for each in times) else ()


def _parameters_of(kind: type[torch.nn.Module]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The positional parameters of a class's forward and their defaults; empty for a forward with `*args`."""
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters):
        return (), {}
    named = [each for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return tuple(each.name for each in named), {each.name: each.default for each in named}


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Two results differ by no more than kernels for different batch sizes do. Raises if one is not a tensor."""
    close = torch.finfo(one.dtype).eps ** 0.75 * other.float().norm()
    return one.shape == other.shape and bool((one.float() - other.float()).norm() <= close)


def _attributes(block: torch.nn.Module) -> list[tuple[str, int]]:
    """Names and value ids of the attributes of a block's modules, except torch's and ComfyUI's bookkeeping."""
    return [
        (name, id(value))
        for part in block.modules()
        for name, value in vars(part).items()
        if name not in TORCH_OWN and not ATTRIBUTES.is_bookkeeping(name)
    ]
