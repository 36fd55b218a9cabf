"""Recognised blocks: the lists of equal modules in a model of ComfyUI's own become regions, whatever the family.

A family that needs more than its blocks' arguments to be compiled well has a file of its own beside this one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .....compile_cache.errors import BypassCode, BypassReason
from .....compile_cache.foreign.reach import names_read
from .....compile_cache.regions.site import Bypass, Hook, RegionFunction, RegionRunner, RegionSite
from .....compile_cache.regions.structure import TORCH_OWN, Memo, structure_digest
from ...comfyui import version
from ...comfyui.module_attributes import ATTRIBUTES
from ...foreign.core_code import is_plain_layer
from ...foreign.trust import why_untrusted
from ..common import UnusableArgumentError, original
from ..unets.unet import is_unet
from .arguments import Arguments, Layout, digest_of, dims_of, put_together, shared_by_batch, take_apart
from .experts import Cut, cut_of, pass_by
from .options import BlockOptions, Reads, RefusedOptionError, fits
from .tested import is_catalogued, shared_arguments, variant_of
from .traced import MADE, OPTIONS, POSITION, RESULTS, call_original, copied_back, enter_block, leave_block, run_block

# A list with fewer weights than this part of the largest list's costs more to compile than it saves.
_SMALLEST_PART = 0.1
# More layouts than this of one kind of block mean that a plain value changes from call to call.
_MOST_LAYOUTS = 16


def hooks(module: torch.nn.Module, run: RegionRunner, bypass: Bypass) -> list[Hook]:
    """Hooks for the repeated blocks of a transformer; empty for a model without any."""
    if is_unet(module) or not version.attention_is_traceable():
        return []
    structures = _Structures()
    found = []
    for name, block in repeated_blocks(module):
        why = why_untrusted(block)
        if why is not None:
            bypass(why)
            continue
        origin = "catalogued" if is_catalogued(type(block)) else "recognised"
        for path, part in _with_shared_experts(name, block):
            structure = structures.of(part)
            forward = RecognisedBlock(path, part, run, bypass, structure)
            found.append(Hook(part, forward, (), (type(part).__name__, path), origin, structure))
    return found


def _with_shared_experts(name: str, block: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """A block, and what all tokens run through in its routed part."""
    yield name, block
    cut = cut_of(block)
    if cut is not None:
        for own, part in block.get_submodule(cut.part).named_children():
            if not isinstance(part, torch.nn.ModuleList) and any(True for _ in part.children()):
                yield f"{name}.{cut.part}.{own}", part


class _Structures:
    """Digests of blocks, without the attributes that their code never reads: the number of a layer, for example."""

    def __init__(self) -> None:
        self._memo: Memo = {}
        self._read: dict[frozenset[type], frozenset[str]] = {}

    def of(self, block: torch.nn.Module) -> str:
        kinds = frozenset(map(type, block.modules()))
        if kinds not in self._read:
            self._read[kinds] = names_read(kinds)
        variant, described = variant_of(block)
        attributes = {name for part in block.modules() for name in vars(part)}
        ignored = (attributes - self._read[kinds]) | described
        structure = structure_digest(block, self._memo, ignored=frozenset(ignored), policy=ATTRIBUTES)
        return digest_of(structure, variant)


def repeated_blocks(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The elements of the largest lists of modules of one class, with their names."""
    lists = list(_lists_of_blocks(module, ""))
    weights = [sum(weight.numel() for _, block in blocks for weight in block.parameters()) for blocks in lists]
    for blocks, count in zip(lists, weights, strict=True):
        if count >= _SMALLEST_PART * max(weights):
            yield from blocks


def _lists_of_blocks(module: torch.nn.Module, path: str) -> Iterator[list[tuple[str, torch.nn.Module]]]:
    """The outermost lists of modules of one class."""
    for name, child in module.named_children():
        inside = f"{path}.{name}" if path else name
        if isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict)) and _are_blocks(child):
            yield [(f"{inside}.{number}", block) for number, block in child.named_children()]
        else:
            yield from _lists_of_blocks(child, inside)


def _are_blocks(container: torch.nn.Module) -> bool:
    blocks = list(container.children())
    kinds = set(map(type, blocks))
    if len(kinds) != 1 or not any(True for _ in blocks[0].children()):
        return False
    (kind,) = kinds
    return not is_plain_layer(kind) and (len(blocks) > 1 or is_catalogued(kind))


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
    """What earlier calls showed of blocks of one structure, in the whole process.

    calls: by layout of the arguments. shared: by layout, see `arguments.dims_of`.
    """

    calls: dict[Layout, list[_Call]] = field(default_factory=dict)
    shared: dict[Layout, frozenset[int]] = field(default_factory=dict)


@functools.cache
def _learned(structure: str) -> _Learned:
    return _Learned()


class RecognisedBlock:
    """The forward of one block: it finds the region for the arguments of a call, and runs it."""

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
            self._bypass(BypassReason(BypassCode.OBSERVED_INPUT, f"{self._kind}: {error}; such blocks run as they are"))
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
            if self._cut is None:
                forward()
            else:
                pass_by(self._block, self._cut, forward)
            after = take_apart(given)
        except RefusedOptionError as error:
            return _Call(reads, refused=error.reason)
        what = ""
        if after.layout != arguments.layout or any(a is not b for a, b in zip(after.tensors, copies, strict=False)):
            what = "changes a list or a dict of its caller's"
        elif _attributes(self._block) != attributes:
            what = "keeps something from call to call"
        if not what:
            tensors = enumerate(zip(arguments.tensors, copies, strict=False))
            return _Call(reads, tuple(number for number, (before, after) in tensors if not torch.equal(before, after)))
        text = f"{self._kind} {what}; such blocks run as they are"
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
            structure = digest_of(self._structure, layout, sorted(call.reads.items()), call.written)
            reads = call.reads if passes_options else None
            kind = f"{self._kind}.{share}" if share else self._kind
            function, without = self._function(layout, reads, call.written, share)
            site = RegionSite(self._name, kind, self._block, function, dims, without, structure)
            self._sites[key] = site
        return site

    def _function(
        self, layout: Layout, reads: Reads | None, written: Sequence[int], share: str
    ) -> tuple[RegionFunction, tuple[str, ...]]:
        """The function of a site, and the modules inside the block that it does not run."""
        if self._cut is None or not share:
            return functools.partial(run_block, layout, self._kind, reads, written), ()
        if share == "enter":
            return functools.partial(enter_block, layout, self._kind, reads, self._cut), self._cut.not_entered
        return functools.partial(leave_block, layout, self._kind, reads, self._cut), self._cut.not_left


def _parameters_of(kind: type[torch.nn.Module]) -> tuple[str, ...]:
    """The names of the parameters of a class's forward that may be given by position."""
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters):
        return ()
    return tuple(each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _attributes(block: torch.nn.Module) -> list[tuple[str, int]]:
    """What the modules of a block hold, beside what torch and ComfyUI note there."""
    return [
        (name, id(value))
        for part in block.modules()
        for name, value in vars(part).items()
        if name not in TORCH_OWN and not ATTRIBUTES.is_bookkeeping(name)
    ]
