"""What a node type of the bundled workflows consists of: sockets, widgets and a title."""

from __future__ import annotations

from dataclasses import dataclass

Slot = tuple[str, str]  # name, type
WidgetValue = str | int | float | bool

# The front end adds these widgets; they are saved in UI form and never queued.
AFTER_GENERATE = "control_after_generate"
UPLOAD = "upload"
FRONT_END_ONLY = frozenset({AFTER_GENERATE, UPLOAD})
NOTE = "MarkdownNote"


@dataclass(frozen=True, slots=True)
class Widget:
    """A value that the user edits on the node, with the server's type and default."""

    name: str
    type: str
    default: WidgetValue


@dataclass(frozen=True, slots=True)
class NodeType:
    """A node type; sockets and widgets are in the front end's order.

    unused: optional inputs and widgets that no bundled workflow names, but for which the front end draws a row.
    """

    id: str
    title: str
    inputs: tuple[Slot, ...] = ()
    widgets: tuple[Widget, ...] = ()
    outputs: tuple[Slot, ...] = ()
    unused: int = 0

    @property
    def is_ours(self) -> bool:
        """Whether this pack provides the type."""
        return self.id.startswith("Resolute")

    @property
    def is_front_end_only(self) -> bool:
        """Whether the type exists only in the browser and never in a prompt."""
        return self.id == NOTE

    def widget(self, name: str) -> Widget | None:
        """The widget of that name, or None."""
        return next((widget for widget in self.widgets if widget.name == name), None)
