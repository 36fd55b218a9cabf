"""A workflow in API form: its nodes and their links. It runs nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ....compile_cache.errors import UserError, excerpt

_HOW_TO_EXPORT = "In ComfyUI choose File, Export (API), and use that file."
_SIZE_INPUTS = ("width", "height", "batch_size")

Link = tuple[str, int]  # node id, output number
Edges = Mapping[str, Collection[str]]  # node id -> ids of the nodes that it leads to


@dataclass(frozen=True, slots=True)
class Node:
    """label: its title or class, and its id. links: the inputs that are connected."""

    class_type: str
    inputs: Mapping[str, Any]
    label: str
    links: Mapping[str, Link]


def parse_workflow(prompt: Any) -> dict[str, Node]:
    """The nodes of a workflow in API form, by id. Raises UserError, which says how to export it, for anything else."""
    if isinstance(prompt, Mapping) and isinstance(prompt.get("nodes"), list):
        raise UserError(f"This workflow is in the form of ComfyUI's editor, not in API form. {_HOW_TO_EXPORT}")
    if not isinstance(prompt, Mapping) or not prompt:
        raise UserError(f"This is not a workflow in API form. {_HOW_TO_EXPORT}")
    return {str(name): _parse_node(name, content) for name, content in prompt.items()}


def _parse_node(name: Any, content: Any) -> Node:
    if not isinstance(content, Mapping) or not isinstance(content.get("class_type"), str):
        entry = f"Entry '{excerpt(name)}' of the workflow"
        raise UserError(f"{entry} is not a node: it has no 'class_type'. {_HOW_TO_EXPORT}")
    class_type, inputs, meta = content["class_type"], content.get("inputs"), content.get("_meta")
    if not isinstance(inputs, Mapping):
        raise UserError(f"Node {excerpt(name)} ({excerpt(class_type)}) has no 'inputs'. {_HOW_TO_EXPORT}")
    title = meta.get("title") if isinstance(meta, Mapping) else None
    called = title if isinstance(title, str) and title.strip() else class_type
    found = {each: as_link(value) for each, value in inputs.items()}
    links = {each: link for each, link in found.items() if link is not None}
    return Node(class_type, inputs, f"{excerpt(called.strip())} {excerpt(name)}", links)


def as_link(value: Any) -> Link | None:
    """The link if ComfyUI would read `value` as one, a list [node id, output number]; None otherwise."""
    if not isinstance(value, list) or len(value) != 2:
        return None
    source, output = value
    if not isinstance(source, str) or isinstance(output, bool) or not isinstance(output, (int, float)):
        return None
    return (source, int(output)) if output == output // 1 else None


def sets_latent_size(node: Node) -> bool:
    """True if the node's own inputs set a latent's size, as in Empty Latent Image and its variants for videos."""
    return all(name in node.inputs for name in _SIZE_INPUTS)


def reached(edges: Edges, starts: Iterable[str]) -> set[str]:
    """`starts` and the ids of all nodes reachable from them."""
    found: set[str] = set()
    waiting = list(starts)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += edges.get(name, ())
    return found
