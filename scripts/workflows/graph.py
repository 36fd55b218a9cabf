"""Builds a workflow in two forms: the UI form for the front end and the API form for the server."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from .models import models_of
from .node_types import FRONT_END_ONLY, NODE_TYPES, NOTE, NodeType, WidgetValue
from .placement import BOX, Frame, Placement, Point, Size

# Heights in pixels, measured in the front end of ComfyUI 0.33.0.
ROW, WIDGET, TEXT, PICTURE, PAD = 20, 24, 90, 236, 20
# The text on a node of ours, as in web/node_text.js: a line, its margins, and the badge that Nodes 2.0 shows below it.
TEXT_LINE, TEXT_MARGINS, BADGE = 16, 16, 40
TEXT_LINES = {
    "ResoluteReport": 12, "ResoluteCompareImages": 6, "ResoluteWarmUp": 8, "ResoluteLoadCheckpoint": 3,
    "ResoluteCompileVAE": 3,
}  # fmt: skip
OUR_WIDGET = 28  # in Nodes 2.0, which draws them taller
TEXTS = ("text", "prompt")  # widgets of several lines
SHOWS_PICTURE = {"LoadImage": PICTURE, "PreviewImage": PICTURE, "SaveImage": PICTURE}
WIDTH = 270
WIDTHS = {"ResoluteReport": 340, "ResoluteCompareImages": 440, "VAEDecode": 220, "SaveImage": 270}
NOTE_WIDTH, NOTE_LETTERS, NOTE_LINE = 580, 62, 22  # pixels, letters in a line, pixels of a line

# Colours of frames around Resolute's nodes and around ComfyUI's, of Resolute's nodes, and of notes.
OURS, STOCK = "#2f7f86", "#3f789e"
OURS_COLORS = {"color": "#233", "bgcolor": "#355"}
NOTE_COLORS = {"color": "#432", "bgcolor": "#653"}
TEMPLATE_PREFIX = "resolute_faster_compiled_"
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
    is_collapsed: bool = False

    def __getitem__(self, output: str) -> Output:
        for slot, (name, kind) in enumerate(self.type.outputs):
            if name == output:
                return Output(self.id, slot, kind)
        raise KeyError(f"{self.type.id} has no output {output!r}")

    @property
    def placed_size(self) -> Size:
        """Width, and height below the title, as it is drawn: a collapsed node is its title."""
        width, height = self.size
        return (width, 0) if self.is_collapsed else (width, height)

    @property
    def below(self) -> int:
        """The gap below it: Nodes 2.0 puts a bar below a node whose model is missing."""
        return 8 if self.is_collapsed else 16 if self.type.id in SHOWS_PICTURE else 44

    @property
    def size(self) -> Size:
        """Width, and height below the title: enough for every socket and widget."""
        if self.type.is_front_end_only:
            lines = sum(1 + len(line) // NOTE_LETTERS for line in str(self.values["text"]).splitlines())
            return NOTE_WIDTH, 2 * PAD + NOTE_LINE * lines
        rows = max(len(self.type.inputs), len(self.type.outputs))
        height = PAD + ROW * rows + WIDGET * self.type.unused
        if self.type.is_ours:
            height += OUR_WIDGET * len(self.type.widgets) + TEXT_LINE * TEXT_LINES.get(self.type.id, 2)
            height += TEXT_MARGINS + BADGE
        else:
            height += sum(TEXT if widget.name in TEXTS else WIDGET for widget in self.type.widgets)
        return WIDTHS.get(self.type.id, WIDTH), height + SHOWS_PICTURE.get(self.type.id, 0)

    def sockets(self) -> list[str]:
        """Inputs first, then widgets, which have sockets too, except on nodes and widgets of the front end only."""
        widgets = [each.name for each in self.type.widgets if each.name not in FRONT_END_ONLY]
        return [name for name, _ in self.type.inputs] + ([] if self.type.is_front_end_only else widgets)


@dataclass(slots=True)
class Group:
    """A titled frame around nodes."""

    title: str
    color: str
    column: int
    nodes: list[Node] = field(default_factory=list)


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

    def group(self, title: str, color: str = STOCK, column: int = 0) -> Group:
        """Add a frame; pass it to ``add``. column: where its placement begins to try."""
        self.groups.append(Group(title, color, column))
        return self.groups[-1]

    def add(self, group: Group, type_id: str, title: str = "", /, **inputs: WidgetValue | Output) -> Node:
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
        node = Node(len(self.nodes) + 1, node_type, title or node_type.title, values, links)
        group.nodes.append(node)
        self.nodes.append(node)
        return node

    def collapse(self, group: Group, *type_ids: str) -> None:
        """Show only the titles of a frame's nodes of these types."""
        for node in group.nodes:
            node.is_collapsed = node.is_collapsed or node.type.id in type_ids

    def note(self, text: str) -> None:
        """Add a Markdown note outside all groups."""
        self.nodes.append(Node(len(self.nodes) + 1, NODE_TYPES[NOTE], "What to look at", {"text": text}, {}))

    def api(self) -> dict[str, dict[str, Any]]:
        """The prompt for ``POST /prompt``, as the front end exports it."""
        return {str(node.id): _api(node) for node in self.nodes if not node.type.is_front_end_only}

    def ui(self, box: Size = BOX) -> dict[str, Any]:
        """The graph in the front end's form (LiteGraph, schema version 0.4). box: that it is to fill."""
        links = self._links()
        ends = [(source, target) for _, source, _, target, *_ in links]
        points, frames = Placement(
            {node.id: node.placed_size for node in self.nodes},
            {node.id: node.below for node in self.nodes},
            ends,
            [[node.id for node in group.nodes] for group in self.groups],
            # A chain of equal nodes, like that of the tour's strip, runs through frames that lie below each other.
            {(one, other) for one, other in ends if self.nodes[one - 1].type is self.nodes[other - 1].type},
            box,
            tuple(group.column for group in self.groups),
        ).best()
        return {
            "id": str(uuid.uuid5(NAMESPACE, self.name)),
            "revision": 0,
            "last_node_id": len(self.nodes),
            "last_link_id": len(links),
            "nodes": [_ui(node, order, links, points[node.id]) for order, node in enumerate(self.nodes)],
            "links": links,
            "groups": [
                _ui_group(number, group, frame)
                for number, (group, frame) in enumerate(zip(self.groups, frames, strict=True), 1)
            ],
            "config": {},
            "extra": {"ds": {"scale": 0.6, "offset": [80, 120]}, "resolute": self._about()},
            "version": 0.4,
        }

    def _about(self) -> dict[str, Any]:
        """For web/templates.js, which translates it. names: of node types, in English."""
        return {"template": self.name, "names": {node.type.id: node.type.title for node in self.nodes}}

    def _links(self) -> list[list[Any]]:
        """Each link: its id, source node and slot, target node and slot, type."""
        ends = [
            [node.links[name].node, node.links[name].slot, node.id, slot, node.links[name].type]
            for node in self.nodes
            for slot, name in enumerate(node.sockets())
            if name in node.links
        ]
        return [[number, *each] for number, each in enumerate(ends, 1)]


def _api(node: Node) -> dict[str, Any]:
    values = {name: v for name, v in node.values.items() if name not in FRONT_END_ONLY}
    linked = {name: [str(link.node), link.slot] for name, link in node.links.items()}
    return {"inputs": values | linked, "class_type": node.type.id, "_meta": {"title": node.title}}


def _ui(node: Node, order: int, links: list[list[Any]], point: Point) -> dict[str, Any]:
    colors = OURS_COLORS if node.type.is_ours else {}
    return {
        "id": node.id,
        "type": node.type.id,
        "pos": list(point),
        "size": list(node.size),
        "flags": {"collapsed": True} if node.is_collapsed else {},
        "order": order,
        "mode": 0,
        "inputs": [_ui_input(node, slot, name, links) for slot, name in enumerate(node.sockets())],
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


def _ui_input(node: Node, slot: int, name: str, links: list[list[Any]]) -> dict[str, Any]:
    link = next((link[0] for link in links if link[3:5] == [node.id, slot]), None)
    widget = node.type.widget(name)
    if widget is None:
        return {"name": name, "type": dict(node.type.inputs)[name], "link": link}
    return {"name": name, "type": widget.type, "widget": {"name": name}, "link": link}


def _ui_group(number: int, group: Group, frame: Frame) -> dict[str, Any]:
    left, top, right, bottom = frame
    return {
        "id": number,
        "title": group.title,
        "bounding": [left, top, right - left, bottom - top],
        "color": group.color,
        "font_size": 24,
        "flags": {},
    }
