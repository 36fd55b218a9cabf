"""Build the prompt that warms up a workflow: Warm Up nodes for what `scan` found, and the nodes that feed them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ....compile_cache.errors import UserError
from ....compile_cache.sizes import MAXIMUM, MINIMUM, MULTIPLES, Size, is_valid
from ....compile_cache.warm_up_plan import CFG, MAX_BATCH, OVERLAP
from ..scan.compile_nodes import LOADERS, MODEL_COMPILERS, VAE_COMPILERS
from ..scan.graph import downstream, model_runners, upstream
from ..scan.node import Link, Node
from ..scan.workflow import Decoding, Sampling, Scan, parse_workflow

WARM_UP = "ResoluteWarmUp"
_NO_TILES = 0

# (class, output number) of the nodes that output a compiled model or VAE.
_COMPILED_MODELS = frozenset((name, 0) for name in MODEL_COMPILERS)
_COMPILED_VAES = frozenset({*((name, 0) for name in VAE_COMPILERS), *((name, 2) for name in LOADERS)})
_CONTROLNET_APPLIERS = ("ControlNetApply", "ControlNetApplyAdvanced", "ControlNetApplySD3")
_CONDITIONING_INPUTS = ("positive", "negative", "conditioning", "conditioning_1", "conditioning_2")


@dataclass(frozen=True, slots=True)
class WarmUpPrompt:
    """prompt: in API form, ready to queue. added: ids of the Warm Up nodes that were added to it.

    warnings: one sentence for each part that is left out or warmed up differently, with the reason.
    """

    prompt: dict[str, dict[str, Any]]
    added: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _NodeInputs:
    """The inputs of one Warm Up node, except its sizes."""

    batch: int
    model: Link | None = None
    positive: Link | None = None
    negative: Link | None = None
    control_net: Link | None = None
    cfg: float = CFG
    vae: Link | None = None
    tile_size: int = _NO_TILES
    overlap: int = OVERLAP

    def links(self) -> dict[str, Link]:
        names = ("model", "vae", "control_net", "positive", "negative")
        return {name: link for name in names if (link := getattr(self, name)) is not None}


Groups = dict[_NodeInputs, set[Size]]


def warm_up_prompt(prompt: Mapping[str, Any], found: Scan) -> WarmUpPrompt:
    """Build one Warm Up node for each combination of model, conditioning, cfg and batch in `found`, with all its sizes.

    The prompt keeps only the workflow's nodes that feed those Warm Up nodes, so it samples, decodes and saves nothing
    itself. Raises UserError if nothing can be warmed up.
    """
    contents = parse_workflow(prompt)
    builder = _Builder({name: Node(name, content) for name, content in contents.items()})
    groups = _merge_decodings(builder.samplings(found.samplings), builder.decodings(found.decodings))
    if not groups:
        reasons = [*builder.warnings, *found.unknown] or ["It has no sampler and no VAE Decode that an output uses."]
        raise UserError(f"Nothing in this workflow can be warmed up. {reasons[0]}")
    needed = upstream(builder.nodes, [source for inputs in groups for source, _ in inputs.links().values()])
    kept: dict[str, dict[str, Any]] = {name: copy.deepcopy(dict(contents[name])) for name in contents if name in needed}
    names = (name for number in range(1, 10**9) if (name := f"warm-up-{number}") not in contents)
    largest_first = sorted(groups.items(), key=lambda group: max(map(_pixels, group[1])), reverse=True)
    added = {next(names): _warm_up_node(inputs, sizes) for inputs, sizes in largest_first}
    return WarmUpPrompt(kept | added, tuple(added), tuple(dict.fromkeys(builder.warnings)))


@dataclass
class _Builder:
    """Groups samplings and decodings into Warm Up nodes, and collects a warning for each that it has to change."""

    nodes: dict[str, Node]
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        saving = {name for name, node in self.nodes.items() if node.class_type.startswith("Save")}
        # Asked for every sampler, so followed through the graph once.
        self._needs = downstream(self.nodes, model_runners(self.nodes) | saving)
        self._compiled = {
            sources: downstream(self.nodes, [name for name, node in self.nodes.items() if self._takes(node, sources)])
            for sources in (_COMPILED_MODELS, _COMPILED_VAES)
        }

    def samplings(self, samplings: Iterable[Sampling]) -> Groups:
        groups: Groups = {}
        for sampling in samplings:
            if self._is_accepted(sampling) and self._is_compiled(sampling, sampling.model, _COMPILED_MODELS, "model"):
                groups.setdefault(self._inputs_of(sampling), set()).add(sampling.size)
        return groups

    def decodings(self, decodings: Iterable[Decoding]) -> Groups:
        groups: Groups = {}
        for decoding in decodings:
            if self._is_accepted(decoding) and self._is_compiled(decoding, decoding.vae, _COMPILED_VAES, "VAE"):
                tile_size = _NO_TILES if decoding.tile_size is None else decoding.tile_size
                overlap = OVERLAP if decoding.overlap is None else decoding.overlap
                inputs = _NodeInputs(decoding.batch, vae=decoding.vae, tile_size=tile_size, overlap=overlap)
                groups.setdefault(inputs, set()).add(decoding.size)
        return groups

    def _inputs_of(self, sampling: Sampling) -> _NodeInputs:
        cfg = sampling.cfg
        if cfg is None:
            cfg = CFG
            self.warnings.append(
                f"{sampling.label}: its cfg is known only when the prompt runs. It is warmed up for every cfg except 1."
            )
        # Warm Up needs both or neither. With one conditioning the cfg is 1, so the negative one is not sampled anyway.
        negative = sampling.positive if sampling.negative is None else sampling.negative
        conditioning = (sampling.positive, negative)
        if not any(map(self._needs_a_run, conditioning)):
            return _NodeInputs(sampling.batch, sampling.model, *conditioning, cfg=cfg)
        return self._inputs_without_a_run(sampling, conditioning, cfg)

    def _inputs_without_a_run(self, sampling: Sampling, conditioning: tuple[Link, Link], cfg: float) -> _NodeInputs:
        """The inputs for a sampler whose conditioning depends on an image or latent that the workflow makes first.

        If only the image of a ControlNet does, Warm Up gets the ControlNet and the conditioning before it, and uses
        noise for the image. Otherwise Warm Up uses dummy conditioning.
        """
        because = "an image or latent that the workflow makes first"
        removed: set[Link] = set()
        positive, negative = (self._before_control(link, removed) for link in conditioning)
        if not any(map(self._needs_a_run, (positive, negative))):
            control_net = self._only_usable(removed)
            result = "Warm Up uses noise for it" if control_net is not None else "Warm Up leaves the ControlNet out"
            self.warnings.append(f"{sampling.label}: its ControlNet needs {because}. {result}.")
            return _NodeInputs(sampling.batch, sampling.model, positive, negative, control_net, cfg)
        control_net = self._control_net(conditioning)
        self.warnings.append(
            f"{sampling.label}: its conditioning needs {because}. Warm Up uses a dummy of the usual length"
            f"{', with the ControlNet' if control_net is not None else ''}."
        )
        return _NodeInputs(sampling.batch, sampling.model, control_net=control_net, cfg=cfg)

    def _is_accepted(self, item: Sampling | Decoding) -> bool:
        """Warm Up accepts this size and batch."""
        if item.is_video:
            self.warnings.append(f"{item.label}: Warm Up makes no videos. The first prompt compiles what it needs.")
        elif not is_valid(item.size, int(MULTIPLES[0])):
            self.warnings.append(
                f"{item.label}: {item.size} is left out. Warm Up accepts {MINIMUM} to {MAXIMUM} pixels a side."
            )
        elif item.batch > MAX_BATCH:
            self.warnings.append(
                f"{item.label}: its batch of {item.batch} is left out. Warm Up accepts up to {MAX_BATCH}."
            )
        else:
            return True
        return False

    def _is_compiled(self, item: Sampling | Decoding, link: Link, sources: frozenset[Link], what: str) -> bool:
        """The model or VAE on `link` comes from a compile node, and can be had without running a sampler."""
        if self._needs_a_run(link):
            self.warnings.append(
                f"{item.label}: its {what} needs an image or latent that the workflow makes first, so it is not warmed "
                "up."
            )
        elif not self._comes_from(link, sources):
            node = "Compile Model" if what == "model" else "Compile VAE Decode"
            self.warnings.append(f"{item.label}: its {what} is not compiled. Put {node} before it.")
        else:
            return True
        return False

    def _needs_a_run(self, link: Link) -> bool:
        """Making this value would run a sampler, a decoder or a node that saves."""
        return link[0] in self._needs

    def _comes_from(self, link: Link, sources: frozenset[Link]) -> bool:
        """`link` or a link upstream of it is one of `sources`, (class, output number)."""
        return self._is_one_of(link, sources) or link[0] in self._compiled[sources]

    def _takes(self, node: Node, sources: frozenset[Link]) -> bool:
        return any(self._is_one_of(link, sources) for link in node.links().values())

    def _is_one_of(self, link: Link, sources: frozenset[Link]) -> bool:
        node = self.nodes.get(link[0])
        if node is None or (node.class_type, link[1]) not in sources:
            return False
        if link[1] != 2:
            return True
        if node.class_type == "ResoluteLoadCheckpoint":
            return node.inputs.get("compile_vae") is not False
        return bool(node.inputs.get("vae_speedup", "disable") != "disable")

    def _before_control(self, conditioning: Link, removed: set[Link]) -> Link:
        """The conditioning before the ControlNets that need a run were applied. Adds those ControlNets to `removed`."""
        for _ in self.nodes:  # a bounded loop, because the graph may have a cycle
            node = self.nodes.get(conditioning[0])
            if node is None or node.class_type not in _CONTROLNET_APPLIERS or not self._needs_a_run(conditioning):
                break
            links = node.links()
            if "control_net" in links:
                removed.add(links["control_net"])
            name = "negative" if conditioning[1] == 1 else "positive"
            conditioning = links.get("conditioning", links.get(name, conditioning))
        return conditioning

    def _control_net(self, conditioning: Sequence[Link]) -> Link | None:
        """The ControlNet applied to the conditioning, if there is exactly one and it needs no run."""
        waiting, found, seen = [source for source, _ in conditioning], set(), set()
        while waiting:
            name = waiting.pop()
            if name in seen or name not in self.nodes:
                continue
            seen.add(name)
            links = self.nodes[name].links()
            if self.nodes[name].class_type in _CONTROLNET_APPLIERS and "control_net" in links:
                found.add(links["control_net"])
            waiting += [links[each][0] for each in _CONDITIONING_INPUTS if each in links]
        return self._only_usable(found)

    def _only_usable(self, control_nets: set[Link]) -> Link | None:
        """The single ControlNet if it needs no run. Warm Up has an input for one ControlNet only."""
        only = next(iter(control_nets)) if len(control_nets) == 1 else None
        return None if only is None or self._needs_a_run(only) else only


def _merge_decodings(samplings: Groups, decodings: Groups) -> Groups:
    """Put the VAE of a decoding into a sampling's node if that node has none and the sizes and the batch are equal."""
    groups = dict(samplings)
    for decoding, sizes in decodings.items():
        fitting = (
            each for each in groups if each.vae is None and each.batch == decoding.batch and groups[each] == sizes
        )
        sampling = next(fitting, None)
        if sampling is None:
            groups[decoding] = sizes
        else:
            del groups[sampling]
            both = replace(sampling, vae=decoding.vae, tile_size=decoding.tile_size, overlap=decoding.overlap)
            groups[both] = sizes
    return groups


def _warm_up_node(inputs: _NodeInputs, sizes: Iterable[Size]) -> dict[str, Any]:
    largest_first = sorted(sizes, key=lambda size: (_pixels(size), size.width), reverse=True)
    return {
        "class_type": WARM_UP,
        "inputs": {
            "sizes": ", ".join(map(str, largest_first)),
            "batch_sizes": str(inputs.batch),
            "prompt_chunks": "1",
            "cfg": inputs.cfg,
            "tile_size": inputs.tile_size,
            "overlap": inputs.overlap,
            **{name: list(link) for name, link in inputs.links().items()},
        },
    }


def _pixels(size: Size) -> int:
    return size.width * size.height
