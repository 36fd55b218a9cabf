"""A workflow in API form: its nodes, their links, and the sizes that stand in it. It runs nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ....compile_cache.errors import UserError, excerpt
from ....compile_cache.sizes import CUSTOM, EXACT, MULTIPLES, NEAREST_VALID, Size, resolve_size

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


def gives_size(node: Node) -> bool:
    """It makes latents of a size, in its own inputs: Empty Latent Image and its kind, also those of videos."""
    return all(name in node.inputs for name in _SIZE_INPUTS)


def size_of(node: Node, nodes: Mapping[str, Node]) -> tuple[Size, int] | None:
    """Width and height in pixels, and the batch, of a node that gives a size.

    None if the workflow does not show them: another node computes one of them while the workflow runs.
    """
    width, height, batch = (_whole_number(node.inputs[name], nodes) for name in _SIZE_INPUTS)
    return None if width is None or height is None or batch is None else (Size(width, height), batch)


def _whole_number(value: Any, nodes: Mapping[str, Node]) -> int | None:
    """A number that is typed in, here, in a Resolution node or in a node that holds nothing else."""
    link = as_link(value)
    source = nodes.get(link[0]) if link is not None else None
    if source is not None and link is not None and source.class_type == "ResoluteResolution":
        size = _resolution(source)
        return None if size is None or link[1] not in (0, 1) else (size.width, size.height)[link[1]]
    number = source.inputs.get("value") if source is not None and source.class_type == "PrimitiveInt" else value
    return number if isinstance(number, int) and not isinstance(number, bool) else None


def _resolution(node: Node) -> Size | None:
    """None if an input of this Resolution node is connected or wrong, or if it takes the nearest ready size."""
    preset, width, height = node.inputs.get("preset", CUSTOM), node.inputs.get("width"), node.inputs.get("height")
    if node.links or not (isinstance(preset, str) and isinstance(width, int) and isinstance(height, int)):
        return None
    use = node.inputs.get("use", NEAREST_VALID)
    if use not in (NEAREST_VALID, EXACT):
        return None
    try:
        multiple = str(node.inputs.get("multiple", MULTIPLES[0]))
        return resolve_size(preset, width, height, multiple, snaps=use != EXACT)
    except ValueError:
        return None


def reached(edges: Edges, starts: Iterable[str]) -> set[str]:
    """`starts` and the ids of all nodes that lead on from them."""
    found: set[str] = set()
    waiting = list(starts)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += edges.get(name, ())
    return found
