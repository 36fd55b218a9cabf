"""From what `scan` found to a prompt that warms it up: Warm Up nodes, and what they need of the workflow."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ....compile_cache.errors import UserError
from ....compile_cache.sizes import MAXIMUM, MINIMUM, Size, is_valid
from ..scan.graph import before, runs_a_model
from ..scan.node import Link, Node
from ..scan.numbers import CELL
from ..scan.workflow import Decoding, Sampling, Scan, checked

WARM_UP = "ResoluteWarmUp"
MOST_PICTURES = 64  # in a batch, as Warm Up takes it
# Where the guidance is known only when the prompt runs: any but 1 samples both texts.
_ANY_CFG = 7.0
_NO_TILES, _OVERLAP = 0, 64

# (class, output) from which a compiled model or VAE comes.
_COMPILED_MODELS = {("ResoluteCompileModel", 0), ("ResoluteLoadCheckpoint", 0)}
_COMPILED_VAES = {("ResoluteCompileVAEDecode", 0), ("ResoluteLoadCheckpoint", 2)}
_APPLIES_CONTROL = ("ControlNetApply", "ControlNetApplyAdvanced", "ControlNetApplySD3")
_TEXT_INPUTS = ("positive", "negative", "conditioning", "conditioning_1", "conditioning_2")


@dataclass(frozen=True, slots=True)
class WarmUpPrompt:
    """prompt: in API form, to be queued as any other. added: the names of its Warm Up nodes that the workflow does not
    have. notes: what it leaves out or does otherwise, and why.
    """

    prompt: dict[str, dict[str, Any]]
    added: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Subject:
    """What one Warm Up node gets, its sizes left out."""

    batch: int
    model: Link | None = None
    positive: Link | None = None
    negative: Link | None = None
    control_net: Link | None = None
    cfg: float = _ANY_CFG
    vae: Link | None = None
    tile_size: int = _NO_TILES
    overlap: int = _OVERLAP

    def links(self) -> dict[str, Link]:
        names = ("model", "vae", "control_net", "positive", "negative")
        return {name: link for name in names if (link := getattr(self, name)) is not None}


Groups = dict[_Subject, set[Size]]


def warm_up_prompt(prompt: Mapping[str, Any], found: Scan) -> WarmUpPrompt:
    """One Warm Up node for each model, texts, guidance and batch that `found` names, with all their sizes.

    Of the workflow, only what leads to those nodes is kept, so that nothing is sampled, decoded or saved by it. Raises
    UserError where nothing is left to warm up.
    """
    contents = checked(prompt)
    builder = _Builder({name: Node(name, content) for name, content in contents.items()})
    groups = _shared(builder.samplings(found.samplings), builder.decodings(found.decodings))
    if not groups:
        why = [*builder.notes, *found.unknown] or ["It has no sampler and no VAE Decode that an output needs."]
        raise UserError(f"Nothing in this workflow can be warmed up. {next(iter(why))}")
    needed = before(builder.nodes, [source for subject in groups for source, _ in subject.links().values()])
    built: dict[str, dict[str, Any]] = {
        name: copy.deepcopy(dict(contents[name])) for name in contents if name in needed
    }
    names = (name for number in range(1, 10**9) if (name := f"warm-up-{number}") not in contents)
    largest_first = sorted(groups.items(), key=lambda group: max(map(_work, group[1])), reverse=True)
    added = {next(names): _warm_up_node(subject, sizes) for subject, sizes in largest_first}
    return WarmUpPrompt(built | added, tuple(added), tuple(dict.fromkeys(builder.notes)))


@dataclass
class _Builder:
    """Sorts what was found into groups, and notes what cannot be warmed up as it is."""

    nodes: dict[str, Node]
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._running = runs_a_model(self.nodes)
        self._saving = {name for name, node in self.nodes.items() if node.class_type.startswith("Save")}

    def samplings(self, samplings: Iterable[Sampling]) -> Groups:
        groups: Groups = {}
        for sampling in samplings:
            if self._is_possible(sampling) and self._is_compiled(sampling, sampling.model, _COMPILED_MODELS, "model"):
                groups.setdefault(self._sampled(sampling), set()).add(sampling.size)
        return groups

    def decodings(self, decodings: Iterable[Decoding]) -> Groups:
        groups: Groups = {}
        for decoding in decodings:
            if self._is_possible(decoding) and self._is_compiled(decoding, decoding.vae, _COMPILED_VAES, "VAE"):
                tile_size = _NO_TILES if decoding.tile_size is None else decoding.tile_size
                overlap = _OVERLAP if decoding.overlap is None else decoding.overlap
                subject = _Subject(decoding.batch, vae=decoding.vae, tile_size=tile_size, overlap=overlap)
                groups.setdefault(subject, set()).add(decoding.size)
        return groups

    def _sampled(self, sampling: Sampling) -> _Subject:
        cfg = sampling.cfg
        if cfg is None:
            cfg = _ANY_CFG
            self.notes.append(f"{sampling.label}: its cfg is known only when it runs; warmed up as for any but 1.")
        # Warm Up takes both texts or neither; at a cfg of 1 the negative one is not sampled.
        negative = sampling.positive if sampling.negative is None else sampling.negative
        texts = (sampling.positive, negative)
        if not any(map(self._needs_a_run, texts)):
            return _Subject(sampling.batch, sampling.model, *texts, cfg=cfg)
        return self._without_a_run(sampling, texts, cfg)

    def _without_a_run(self, sampling: Sampling, texts: tuple[Link, Link], cfg: float) -> _Subject:
        """Of a ControlNet only its picture may be missing: Warm Up puts noise in its place."""
        because = "a picture or latent that is made while the workflow runs"
        taken: set[Link] = set()
        positive, negative = (self._without_control(text, taken) for text in texts)
        if not any(map(self._needs_a_run, (positive, negative))):
            control_net = self._usable(taken)
            used = "it is warmed with noise" if control_net is not None else "its texts are used without ControlNet"
            self.notes.append(f"{sampling.label}: its ControlNet needs {because}, so {used}.")
            return _Subject(sampling.batch, sampling.model, positive, negative, control_net, cfg)
        control_net = self._control_net(texts)
        self.notes.append(
            f"{sampling.label}: its texts need {because}, so they are left out and other texts of the usual length are "
            f"used{', with the ControlNet' if control_net is not None else ''}."
        )
        return _Subject(sampling.batch, sampling.model, control_net=control_net, cfg=cfg)

    def _is_possible(self, item: Sampling | Decoding) -> bool:
        if not is_valid(item.size, CELL):
            self.notes.append(f"{item.label}: {item.size} is left out; Warm Up takes {MINIMUM} to {MAXIMUM} pixels.")
        elif item.batch > MOST_PICTURES:
            most = f"Warm Up takes {MOST_PICTURES} at most"
            self.notes.append(f"{item.label}: a batch of {item.batch} is left out; {most}.")
        else:
            return True
        return False

    def _is_compiled(self, item: Sampling | Decoding, link: Link, sources: set[Link], what: str) -> bool:
        if self._needs_a_run(link):
            self.notes.append(
                f"{item.label}: its {what} needs a picture or latent that is made while the workflow runs, so it is "
                "not warmed up."
            )
        elif not self._comes_from(link, sources):
            node = "Compile Model" if what == "model" else "Compile VAE Decode"
            self.notes.append(f"{item.label}: its {what} is not compiled. Put {node} before it to have it warmed up.")
        else:
            return True
        return False

    def _needs_a_run(self, link: Link) -> bool:
        return bool(before(self.nodes, [link[0]]) & (self._running | self._saving))

    def _comes_from(self, link: Link, sources: set[Link]) -> bool:
        """Whether the link, or one of those before it, is such an output."""
        found = before(self.nodes, [link[0]])
        links = [link, *(each for name in found for each in self.nodes[name].links().values())]
        return any(
            source in self.nodes
            and (self.nodes[source].class_type, output) in sources
            and (output != 2 or self.nodes[source].inputs.get("compile_vae") is not False)
            for source, output in links
        )

    def _without_control(self, text: Link, taken: set[Link]) -> Link:
        """The text before a ControlNet that needs a run was put onto it. Such ControlNets are added to `taken`."""
        for _ in self.nodes:  # once for each at most: the graph may have a cycle
            node = self.nodes.get(text[0])
            if node is None or node.class_type not in _APPLIES_CONTROL or not self._needs_a_run(text):
                break
            links = node.links()
            if "control_net" in links:
                taken.add(links["control_net"])
            text = links.get("conditioning", links.get("negative" if text[1] == 1 else "positive", text))
        return text

    def _control_net(self, texts: Sequence[Link]) -> Link | None:
        """The only ControlNet that is put onto the texts, if there is one and it can be had without a run."""
        waiting, found, seen = [source for source, _ in texts], set(), set()
        while waiting:
            name = waiting.pop()
            if name in seen or name not in self.nodes:
                continue
            seen.add(name)
            links = self.nodes[name].links()
            if self.nodes[name].class_type in _APPLIES_CONTROL and "control_net" in links:
                found.add(links["control_net"])
            waiting += [links[each][0] for each in _TEXT_INPUTS if each in links]
        return self._usable(found)

    def _usable(self, control_nets: set[Link]) -> Link | None:
        """Warm Up takes one ControlNet."""
        only = next(iter(control_nets)) if len(control_nets) == 1 else None
        return None if only is None or self._needs_a_run(only) else only


def _shared(samplings: Groups, decodings: Groups) -> Groups:
    """Decodings of the same sizes and batch go into the node of a sampling."""
    groups = dict(samplings)
    for decoding, sizes in decodings.items():
        host = next((each for each in groups if _can_host(each, groups[each], decoding, sizes)), None)
        if host is None:
            groups[decoding] = sizes
        else:
            del groups[host]
            more = replace(host, vae=decoding.vae, tile_size=decoding.tile_size, overlap=decoding.overlap)
            groups[more] = sizes
    return groups


def _can_host(subject: _Subject, sizes: set[Size], decoding: _Subject, decoded: set[Size]) -> bool:
    return subject.vae is None and subject.batch == decoding.batch and sizes == decoded


def _warm_up_node(subject: _Subject, sizes: Iterable[Size]) -> dict[str, Any]:
    largest_first = sorted(sizes, key=lambda size: (_work(size), size.width), reverse=True)
    return {
        "class_type": WARM_UP,
        "inputs": {
            "sizes": ", ".join(map(str, largest_first)),
            "batch_sizes": str(subject.batch),
            "prompt_chunks": "1",
            "cfg": subject.cfg,
            "tile_size": subject.tile_size,
            "overlap": subject.overlap,
            **{name: list(link) for name, link in subject.links().items()},
        },
    }


def _work(size: Size) -> int:
    return size.width * size.height
