"""The graph of a workflow in API form: its order, what comes before a node, and what becomes of one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from .node import Link, Node, NotKnownError
from .rules import DECODERS, RULES, SAMPLERS, SWITCHES

Nodes = Mapping[str, Node]

# Inputs that pass a model or a text on: what goes into them is no latent and no picture.
_PASSED_ON = ("model", "positive", "negative", "conditioning", "cond", "clip", "vae", "guider")
# How other packs name the inputs that take all of these at once: basic_pipe, detailer_pipe, pipe.
_PIPE = "pipe"


def in_order(nodes: Nodes) -> Iterator[Node]:
    """Every node after all that it depends on; those of a cycle, and what depends on one, are left out."""
    waiting = {name: {source for source, _ in node.links().values()} & nodes.keys() for name, node in nodes.items()}
    users: dict[str, list[str]] = {}
    for name, sources in waiting.items():
        for source in sources:
            users.setdefault(source, []).append(name)
    ready = [name for name, sources in waiting.items() if not sources]
    while ready:
        name = ready.pop()
        yield nodes[name]
        for user in users.get(name, []):
            waiting[user].discard(name)
            if not waiting[user]:
                ready.append(user)


def live(nodes: Nodes) -> list[Node]:
    """The nodes that an output may need, in the order of the workflow.

    At the end of a workflow only output nodes run. A class without a rule may be one; those with a rule are none.
    """
    used = {source for node in nodes.values() for source, _ in node.links().values()}
    ends = [name for name, node in nodes.items() if name not in used and node.class_type not in RULES]
    needed = before(nodes, ends)
    return [node for name, node in nodes.items() if name in needed]


def before(nodes: Nodes, names: Iterable[str]) -> set[str]:
    """The ids of `names` and of everything that they depend on, as far as the workflow has it."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in nodes and name not in found:
            found.add(name)
            waiting += [source for source, _ in _run_links(nodes[name]).values()]
    return found


def runs_a_model(nodes: Nodes) -> set[str]:
    """The ids of samplers and decoders, those among them that have no rule."""
    known = {name for name, node in nodes.items() if node.class_type in SAMPLERS or node.class_type in DECODERS}
    return known | {node.id for node in without_rule(nodes.values())}


def without_rule(nodes: Collection[Node]) -> list[Node]:
    """Nodes that take what a sampler or a decoder takes and give a latent or a picture, and that have no rule."""
    uses: dict[str, set[str]] = {}
    for node in nodes:
        for name, (source, _) in node.links().items():
            uses.setdefault(source, set()).add(name)
    return [node for node in nodes if _takes_a_model(node) and not _only_passed_on(uses.get(node.id, set()))]


def _takes_a_model(node: Node) -> bool:
    if node.class_type in RULES or node.class_type == "ResoluteWarmUp":
        return False
    linked = node.links().keys()
    samples = bool(linked & {"model", "guider"}) and bool(linked & {"positive", "latent_image", "samples", "latent"})
    return samples or linked >= {"vae", "samples"} or any(name.endswith(_PIPE) for name in linked)


def _only_passed_on(uses: set[str]) -> bool:
    return bool(uses) and all(name.startswith(_PASSED_ON) or name.endswith(_PIPE) for name in uses)


def _run_links(node: Node) -> dict[str, Link]:
    """The links that are run for the node: a switch has one that is not."""
    links = node.links()
    if node.class_type not in SWITCHES:
        return links
    try:
        chosen = SWITCHES[node.class_type](node)
    except NotKnownError:
        return links
    return {name: link for name, link in links.items() if name not in ("on_true", "on_false") or name == chosen}
