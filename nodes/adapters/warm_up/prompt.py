"""Build the prompt that warms up a workflow: the same workflow, in which each sampler runs as few steps as possible.

1. The output nodes are removed, so nothing is saved. Each link to them ends in one of our step nodes instead. The step
   nodes run one after the other; the last one is the prompt's only output node and shows the report.
2. A step node is inserted into each link of a model or a VAE, right before the node that uses it. It gives the model a
   sampler of few steps (`one_step.py`) and makes ComfyUI rerun the nodes after it, although their inputs are the same.
3. ComfyUI caches results by inputs. A step node precedes each sampler, so the workflow never reuses a warm-up's result.
   Nodes before the step nodes (loaders, compile nodes, texts) share their cached results with the workflow.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....compile_cache.errors import UserError
from ....compile_cache.warm_up_plan import Item
from ..comfyui.compile_nodes import LOADERS, MODEL_COMPILERS, VAE_COMPILERS
from .workflow import Link, Node, parse_workflow, reached, sets_latent_size

STEP, END = "ResoluteWarmUpStep", "ResoluteWarmUpEnd"

_ANY = ("*", "COMFY_MATCHTYPE_V3")  # the type of the value is known only when the workflow runs
_MODEL, _VAE = "MODEL", "VAE"
# A node whose outputs all have these types passes models on and runs none.
_PASSED_ON = frozenset({_MODEL, _VAE, "CLIP", "CONTROL_NET", "CLIP_VISION", "STRING", *_ANY})
_COMPILERS = {
    _MODEL: (MODEL_COMPILERS, "model is not compiled. Put Compile Model before it."),
    _VAE: ((*VAE_COMPILERS, *LOADERS), "VAE is not compiled. Put Compile VAE Decode before it."),
}
_NEVER_COMPILED = frozenset({"CLIP", "CONDITIONING", "LATENT", "IMAGE"})

Prompt = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class WarmUpPrompt:
    """prompt: in API form, ready to queue. warnings: one sentence, with the reason, for each part that is left out or
    compiles nothing.
    """

    prompt: Prompt
    warnings: tuple[str, ...]


def warm_up_prompt(prompt: Any, classes: Mapping[str, Any], asked: Sequence[Item] = ()) -> WarmUpPrompt:
    """The prompt that warms up a workflow in API form, once for each size in `asked`, or once at its own size.

    classes: ComfyUI's node classes by id. Raises UserError if `prompt` is no such workflow, if none of its nodes can be
    warmed up, or if `asked` has sizes and no node sets the size.
    """
    graph = _Graph(parse_workflow(prompt), classes)
    uses, warnings = graph.uses(), graph.warnings()
    compiled = [use for use in uses if graph.why_not_compiled(*use) is None]
    if not compiled:
        reasons = [*warnings, "It has no sampler and no VAE Decode that an output uses."]
        raise UserError(f"Nothing in this workflow can be warmed up. {reasons[0]}")
    sized = [name for name in graph.kept if sets_latent_size(graph.nodes[name])]
    if asked and not sized:
        raise UserError("No node of this workflow has a width, a height and a batch_size, so it runs at one size only.")
    builder = _Builder(graph, set(uses), reached(graph.users, sized))
    for number, item in enumerate(asked or [None]):
        builder.add(number, item)
    builder.finish()
    return WarmUpPrompt(builder.prompt, tuple(dict.fromkeys(warnings)))


class _Graph:
    """The nodes that a workflow's outputs need. Output nodes are bypassed, as ComfyUI bypasses a node."""

    def __init__(self, nodes: Mapping[str, Node], classes: Mapping[str, Any]) -> None:
        self.nodes, self._classes = nodes, classes
        self._savers: dict[str, Node] = {}  # output nodes with a result that others need
        outputs = {name for name, node in nodes.items() if getattr(self._class(node), "OUTPUT_NODE", False) is True}
        self._outputs = outputs
        found = {name: self._sources(node) for name, node in nodes.items()}
        self.links = {
            name: {each: link for each, link in links.items() if link is not None} for name, links in found.items()
        }
        self.users: dict[str, list[str]] = {}
        for name in nodes.keys() - outputs:
            for source, _ in self.links[name].values():
                self.users.setdefault(source, []).append(name)
        lost = reached(self.users, [name for name in nodes.keys() - outputs if None in found[name].values()])
        ends = [link for name in nodes if name in outputs for link in self.links[name].values()]
        self.ends = [link for link in dict.fromkeys(ends) if link[0] in nodes and link[0] not in lost]
        sources = {name: [source for source, _ in links.values()] for name, links in self.links.items()}
        needed = reached(sources, [source for source, _ in self.ends])
        self.kept = [name for name in nodes if name in needed]
        self._compiled = {
            kind: reached(self._edges_of(kind), [name for name, node in nodes.items() if _compiles(node, kind)])
            for kind in _COMPILERS
        }

    def uses(self) -> list[tuple[str, str]]:
        """(node, input) of each use of a model or a VAE by a node that may run it."""
        return [
            (name, each)
            for name in self.kept
            if not self._passes_on(self.nodes[name])
            for each, link in self.links[name].items()
            if self._type(link) in (_MODEL, _VAE, *_ANY)
        ]

    def why_not_compiled(self, name: str, each: str) -> str | None:
        """A sentence if this input's model or VAE is not compiled. None if it is; empty if the type is not known."""
        link = self.links[name][each]
        kind = self._type(link)
        if kind not in _COMPILERS:
            return ""
        return None if link[0] in self._compiled[kind] else f"{self.nodes[name].label}: its {_COMPILERS[kind][1]}"

    def warnings(self) -> list[str]:
        """A sentence for each part that is left out, and for each model or VAE that is not compiled."""
        saved = [
            f"{node.label}: a warm-up runs no output node, so what needs its result is left out."
            for node in self._savers.values()
        ]
        return [*saved, *(why for use in self.uses() if (why := self.why_not_compiled(*use)))]

    def _sources(self, node: Node) -> dict[str, Link | None]:
        return {name: self._source(link) for name, link in node.links.items()}

    def _source(self, link: Link) -> Link | None:
        """The link that provides the value if no output node runs; None if only an output node computes it."""
        current: Link | None = link
        for _ in range(len(self._outputs) + 1):  # a bounded loop, because the workflow may have a cycle
            if current is None or current[0] not in self._outputs:
                return current
            node, kind = self.nodes[current[0]], self._type(current)
            same = (each for each in node.links.values() if kind in (self._type(each), *_ANY))
            current = next(same, None)
            if current is None:
                self._savers[link[0]] = node
        return None

    def _edges_of(self, kind: str) -> dict[str, list[str]]:
        """The links that may carry a compiled model or VAE, also inside a pipe: node -> nodes that use its outputs."""
        other = _NEVER_COMPILED | _COMPILERS.keys() - {kind}
        edges: dict[str, list[str]] = {}
        for name, links in self.links.items():
            for link in links.values():
                if self._type(link) not in other:
                    edges.setdefault(link[0], []).append(name)
        return edges

    def _class(self, node: Node) -> Any:
        return self._classes.get(node.class_type)

    def _type(self, link: Link) -> str:
        """The type of an output. Empty if it is not known."""
        node = self.nodes.get(link[0])
        types = () if node is None else getattr(self._class(node), "RETURN_TYPES", ())
        return str(types[link[1]]) if 0 <= link[1] < len(types) else ""

    def _passes_on(self, node: Node) -> bool:
        return set(map(str, getattr(self._class(node), "RETURN_TYPES", ("",)))) <= _PASSED_ON


def _compiles(node: Node, kind: str) -> bool:
    """True for a compile node of this kind. A loader counts for a VAE if its inputs ask for a compiled one."""
    if kind == _VAE and node.class_type in LOADERS:
        asked = node.inputs.get("compile_vae", True) is not False
        return asked if node.class_type == LOADERS[0] else node.inputs.get("vae_speedup", "disable") != "disable"
    return node.class_type in _COMPILERS[kind][0]


class _Builder:
    """Collects the nodes of the new prompt, size by size: each size starts after the previous one ends."""

    def __init__(self, graph: _Graph, uses: set[tuple[str, str]], sized: set[str]) -> None:
        """uses: see `_Graph.uses`. sized: the nodes that depend on the size; they are copied for each size."""
        self._graph, self._uses, self._sized = graph, uses, sized
        self._names = (name for number in itertools.count(1) if (name := f"warm-up-{number}") not in graph.nodes)
        self._last = ""  # the last step node that was added
        self.prompt: Prompt = {}

    def add(self, number: int, item: Item | None) -> None:
        """Add the workflow at this size, or at its own if None. Nodes that do not depend on the size are added once."""
        graph, before = self._graph, self._last
        names = {name: next(self._names) if number and name in self._sized else name for name in graph.kept}
        placed: dict[Link, str] = {}
        for name in graph.kept:
            if names[name] in self.prompt:
                continue
            node = graph.nodes[name]
            inputs = {each: value for each, value in node.inputs.items() if each not in node.links}
            for each, (source, output) in graph.links[name].items():
                link = (names.get(source, source), output)
                if (name, each) in self._uses:
                    if link not in placed:
                        placed[link] = self._step(link, before)
                    link = (placed[link], 0)
                inputs[each] = list(link)
            if item is not None and sets_latent_size(node):
                inputs |= {"width": item.size.width, "height": item.size.height, "batch_size": item.batch}
            self.prompt[names[name]] = {"class_type": node.class_type, "inputs": inputs}
        for source, output in graph.ends:
            self._last = self._step((names[source], output), self._last)

    def finish(self) -> None:
        """Make the last step node the only output node, so that ComfyUI refuses the prompt for any error in it."""
        self.prompt[self._last]["class_type"] = END

    def _step(self, link: Link, before: str) -> str:
        """Add a step node that passes the value of `link` on after the step node `before` has run. Returns its id."""
        name = next(self._names)
        waits = {"before": [before, 0]} if before else {}
        self.prompt[name] = {"class_type": STEP, "inputs": {"any": list(link), **waits}}
        return name
