"""Builds a workflow in two forms: the UI form for the front end and the API form for the server."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from .models import models_of
from .nodes import FRONT_END_ONLY, NODE_TYPES, NOTE, NodeType, WidgetValue

# Pixels on the canvas, measured in the front end of ComfyUI 0.33.0.
TITLE, ROW, WIDGET, TEXT, PICTURE, PAD = 30, 20, 24, 90, 240, 20
GAP, RIGHTWARD_GAP, GROUP_TITLE = 20, 80, 50
BELOW = 44  # between two nodes: Nodes 2.0 puts a bar below a node whose model is missing
OURS_COLORS = {"color": "#233", "bgcolor": "#355"}
NOTE_COLORS = {"color": "#432", "bgcolor": "#653"}
# The text on a node of ours, as in web/node_text.js: a line, its margins, and the badge that Nodes 2.0 shows below it.
TEXT_LINE, TEXT_MARGINS, BADGE = 16, 16, 40
TEXT_LINES = {"ResoluteReport": 12, "ResoluteCompareImages": 6, "ResoluteWarmUp": 8}
OUR_WIDGET = 28  # in Nodes 2.0, which draws them taller
SHOWS_PICTURE = frozenset({"LoadImage", "PreviewImage", "SaveImage"})
TEMPLATE_PREFIX = "resolute_compile_"
NAMESPACE = uuid.UUID("6d2ab0c5-7e0c-5d39-9a1e-3a1d1c8f5b10")


@dataclass(frozen=True, slots=True)
class Output:
    """An output socket that another node's input can link to."""

    node: int
    slot: int
    type: str


@dataclass(slots=True)
class Node:
    """A node of a graph; ``values`` are its widgets', ``links`` its inputs'."""

    id: int
    type: NodeType
    title: str
    values: dict[str, WidgetValue]
    links: dict[str, Output]
    width: int
    position: tuple[int, int] = (0, 0)
    text_height: int = TEXT

    def __getitem__(self, output: str) -> Output:
        for slot, (name, kind) in enumerate(self.type.outputs):
            if name == output:
                return Output(self.id, slot, kind)
        raise KeyError(f"{self.type.id} has no output {output!r}")

    @property
    def height(self) -> int:
        """Pixels below the title, enough for every socket and widget."""
        rows = max(len(self.type.inputs), len(self.type.outputs))
        height = PAD + ROW * rows + WIDGET * self.type.unused
        if self.type.is_ours:
            lines = TEXT_LINES.get(self.type.id, 2)
            return height + OUR_WIDGET * len(self.type.widgets) + TEXT_LINE * lines + TEXT_MARGINS + BADGE
        for widget in self.type.widgets:
            is_text = widget.name == "text"
            height += self.text_height if is_text else WIDGET
        return height + (PICTURE if self.type.id in SHOWS_PICTURE else 0)


@dataclass(slots=True)
class Group:
    """A titled frame; its nodes are in one line, downward or to the right."""

    title: str
    position: tuple[int, int]
    color: str
    rightward: bool
    nodes: list[Node] = field(default_factory=list)

    def next_position(self) -> tuple[int, int]:
        """Position of the next node's body."""
        x, y = self.position[0] + GAP, self.position[1] + GROUP_TITLE + TITLE
        for node in self.nodes:
            if self.rightward:
                x += node.width + RIGHTWARD_GAP
            else:
                y += node.height + TITLE + BELOW
        return x, y

    @property
    def below(self) -> int:
        """Where a frame below this one begins."""
        _, top, _, height = self.bounding()
        return top + height + GAP + 10

    def bounding(self) -> list[int]:
        """Left, top, width and height around the nodes."""
        left, top = self.position
        right = max(node.position[0] + node.width for node in self.nodes) + GAP
        bottom = max(node.position[1] + node.height for node in self.nodes) + GAP
        return [left, top, right - left, bottom - top]


class Graph:
    """A workflow under construction; nodes get ids in the order in which they are added."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[Node] = []
        self.groups: list[Group] = []

    @property
    def template(self) -> str:
        """The name of the template's file: what the template browser shows, and all that its search looks at."""
        return f"{TEMPLATE_PREFIX}{self.name}"

    def group(self, title: str, at: tuple[int, int], color: str, rightward: bool = False) -> Group:
        """Add a frame with its top left corner at ``at``; pass it to ``add``."""
        group = Group(title, at, color, rightward)
        self.groups.append(group)
        return group

    def add(
        self,
        group: Group,
        type_id: str,
        *,
        title: str = "",
        wide: int = 300,
        **inputs: WidgetValue | Output,
    ) -> Node:
        """Add a node; inputs are widget values or outputs of other nodes.

        Raises KeyError for an input that the type does not have, and TypeError for an
        output of another type.
        """
        node_type = NODE_TYPES[type_id]
        kinds = dict(node_type.inputs) | {w.name: w.type for w in node_type.widgets}
        values = {widget.name: widget.default for widget in node_type.widgets}
        links: dict[str, Output] = {}
        for name, value in inputs.items():
            if name not in kinds:
                raise KeyError(f"{type_id} has no input {name!r}")
            if not isinstance(value, Output):
                values[name] = value
            elif "*" in (kinds[name], value.type) or kinds[name] == value.type:
                links[name] = value
            else:
                raise TypeError(f"{type_id}.{name} takes {kinds[name]}, not {value.type}")
        node = Node(
            len(self.nodes) + 1,
            node_type,
            title or node_type.title,
            values,
            links,
            wide,
        )
        node.position = group.next_position()
        group.nodes.append(node)
        self.nodes.append(node)
        return node

    def note(self, text: str, at: tuple[int, int], width: int, height: int) -> None:
        """Add a Markdown note outside all groups."""
        node_type = NODE_TYPES[NOTE]
        node = Node(len(self.nodes) + 1, node_type, "What to look at", {"text": text}, {}, width)
        node.position, node.text_height = (at[0], at[1] + TITLE), height
        self.nodes.append(node)

    def api(self) -> dict[str, dict[str, Any]]:
        """The prompt for ``POST /prompt``, as the front end exports it."""
        return {str(node.id): _api(node) for node in self.nodes if not node.type.is_front_end_only}

    def ui(self) -> dict[str, Any]:
        """The graph in the front end's form (LiteGraph, schema version 0.4)."""
        links = self._links()
        return {
            "id": str(uuid.uuid5(NAMESPACE, self.name)),
            "revision": 0,
            "last_node_id": len(self.nodes),
            "last_link_id": len(links),
            "nodes": [_ui(node, order, links) for order, node in enumerate(self.nodes)],
            "links": links,
            "groups": [_ui_group(number, group) for number, group in enumerate(self.groups, 1)],
            "config": {},
            "extra": {"ds": {"scale": 0.6, "offset": [80, 120]}},
            "version": 0.4,
        }

    def _links(self) -> list[list[Any]]:
        """Each link: its id, source node and slot, target node and slot, type."""
        links: list[list[Any]] = []
        for node in self.nodes:
            for slot, name in enumerate(_socket_names(node)):
                if name in node.links:
                    source = node.links[name]
                    ends = [source.node, source.slot, node.id, slot, source.type]
                    links.append([len(links) + 1, *ends])
        return links


def _socket_names(node: Node) -> list[str]:
    """Inputs first, then widgets, which have sockets too, except on nodes and widgets of the front end only."""
    widgets = [w.name for w in node.type.widgets if w.name not in FRONT_END_ONLY]
    return [
        *(name for name, _ in node.type.inputs),
        *([] if node.type.is_front_end_only else widgets),
    ]


def _api(node: Node) -> dict[str, Any]:
    values = {name: v for name, v in node.values.items() if name not in FRONT_END_ONLY}
    linked = {name: [str(link.node), link.slot] for name, link in node.links.items()}
    return {
        "inputs": values | linked,
        "class_type": node.type.id,
        "_meta": {"title": node.title},
    }


def _ui(node: Node, order: int, links: list[list[Any]]) -> dict[str, Any]:
    colors = OURS_COLORS if node.type.is_ours else {}
    return {
        "id": node.id,
        "type": node.type.id,
        "pos": list(node.position),
        "size": [node.width, node.height],
        "flags": {},
        "order": order,
        "mode": 0,
        "inputs": [_ui_input(node, slot, links) for slot in range(len(_socket_names(node)))],
        "outputs": [
            {
                "name": name,
                "type": kind,
                "slot_index": slot,
                "links": [link[0] for link in links if link[1:3] == [node.id, slot]] or None,
            }
            for slot, (name, kind) in enumerate(node.type.outputs)
        ],
        "title": node.title,
        "properties": _properties(node),
        "widgets_values": list(node.values.values()),
        **(NOTE_COLORS if node.type.is_front_end_only else colors),
    }


def _properties(node: Node) -> dict[str, Any]:
    if node.type.is_front_end_only:
        return {}
    origin = {} if node.type.is_ours else {"cnr_id": "comfy-core"}
    models = models_of(dict(node.values))
    return {**origin, "Node name for S&R": node.type.id, **({"models": models} if models else {})}


def _ui_input(node: Node, slot: int, links: list[list[Any]]) -> dict[str, Any]:
    name = _socket_names(node)[slot]
    link = next((link[0] for link in links if link[3:5] == [node.id, slot]), None)
    widget = node.type.widget(name)
    if widget is None:
        return {"name": name, "type": dict(node.type.inputs)[name], "link": link}
    return {"name": name, "type": widget.type, "widget": {"name": name}, "link": link}


def _ui_group(number: int, group: Group) -> dict[str, Any]:
    return {
        "id": number,
        "title": group.title,
        "bounding": group.bounding(),
        "color": group.color,
        "font_size": 24,
        "flags": {},
    }
