"""Progress on the node, and ComfyUI's Cancel between two units of work."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import comfy.model_management

from .messages import show_on_node

logger = logging.getLogger(__name__)


class NodeProgress:
    """Shows text on one node; without a server (in tests) it only logs."""

    cancellations: tuple[type[BaseException], ...] = (comfy.model_management.InterruptProcessingException,)

    def __init__(self, node_id: str | None) -> None:
        self.node_id = node_id

    def raise_if_cancelled(self) -> None:
        """Raise ComfyUI's own interruption if the user pressed Cancel."""
        comfy.model_management.throw_exception_if_processing_interrupted()

    def begin_block(self) -> None:
        """A block of a call is about to run. ComfyUI's own operations look for Cancel too, and a region has none."""
        self.raise_if_cancelled()

    def report(self, done: int, total: int, text: str, left: Sequence[str] = ()) -> None:
        logger.info("Resolute: %s", text)
        self.show(text)

    def show(self, text: str) -> None:
        """Put a text of at most two lines on the node; the front end replaces the one that was there."""
        show_on_node(text, self.node_id)
