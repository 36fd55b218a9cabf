"""The graph of a workflow in API form: its order, which nodes run, and which of them run a model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from .node import Link, Node, NotKnownError
from .rules import DECODERS, RULES, SAMPLERS, SWITCHES

Nodes = Mapping[str, Node]

# Input names of models and conditioning. A node whose output only goes into these makes no latent and no image.
_MODEL_INPUTS = ("model", "positive", "negative", "conditioning", "cond", "clip", "vae", "guider")
# Other packs bundle these into one input: basic_pipe, detailer_pipe, pipe.
_PIPE = "pipe"


def topological_order(nodes: Nodes) -> Iterator[Node]:
    """Each node after the nodes that it depends on. Nodes in a cycle, and nodes that depend on one, are left out."""
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


def nodes_that_run(nodes: Nodes) -> list[Node]:
    """The nodes that an output node may need, in the order of the workflow.

    ComfyUI runs output nodes and what they depend on. A class without a rule may be an output node. A class with a rule
    is none (a test checks that), so if nothing uses its output, it does not run.
    """
    used = {source for node in nodes.values() for source, _ in node.links().values()}
    ends = [name for name, node in nodes.items() if name not in used and node.class_type not in RULES]
    needed = upstream(nodes, ends)
    return [node for name, node in nodes.items() if name in needed]


def upstream(nodes: Nodes, names: Iterable[str]) -> set[str]:
    """`names` and the ids of all nodes that they depend on. Ids that the workflow does not have are left out."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in nodes and name not in found:
            found.add(name)
            waiting += [source for source, _ in active_links(nodes[name]).values()]
    return found


def downstream(nodes: Nodes, names: Iterable[str]) -> set[str]:
    """`names` and the ids of all nodes that depend on them: those whose `upstream` has one of `names`."""
    users: dict[str, list[str]] = {}
    for name, node in nodes.items():
        for source, _ in active_links(node).values():
            users.setdefault(source, []).append(name)
    found: set[str] = set()
    waiting = [name for name in names if name in nodes]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += users.get(name, [])
    return found


def model_runners(nodes: Nodes) -> set[str]:
    """The ids of all samplers and decoders, and of nodes without a rule that look like one."""
    known = {name for name, node in nodes.items() if node.class_type in SAMPLERS or node.class_type in DECODERS}
    return known | {node.id for node in possible_model_runners(nodes.values())}


def possible_model_runners(nodes: Collection[Node]) -> list[Node]:
    """Nodes without a rule that have the inputs of a sampler or a decoder and may output a latent or an image."""
    uses: dict[str, set[str]] = {}
    for node in nodes:
        for name, (source, _) in node.links().items():
            uses.setdefault(source, set()).add(name)
    return [node for node in nodes if _has_inputs_of_runner(node) and not _feeds_model_inputs(uses.get(node.id, set()))]


def _has_inputs_of_runner(node: Node) -> bool:
    if node.class_type in RULES or node.class_type == "ResoluteWarmUp":
        return False
    linked = node.links().keys()
    samples = bool(linked & {"model", "guider"}) and bool(linked & {"positive", "latent_image", "samples", "latent"})
    return samples or linked >= {"vae", "samples"} or any(name.endswith(_PIPE) for name in linked)


def _feeds_model_inputs(uses: set[str]) -> bool:
    """A node's outputs go into inputs of models and conditioning only. `uses`: the names of those inputs."""
    return bool(uses) and all(name.startswith(_MODEL_INPUTS) or name.endswith(_PIPE) for name in uses)


def active_links(node: Node) -> dict[str, Link]:
    """The links that ComfyUI evaluates. A switch evaluates only the one that it is set to."""
    links = node.links()
    if node.class_type not in SWITCHES:
        return links
    try:
        chosen = SWITCHES[node.class_type](node)
    except NotKnownError:
        return links
    return {name: link for name, link in links.items() if name not in ("on_true", "on_false") or name == chosen}
