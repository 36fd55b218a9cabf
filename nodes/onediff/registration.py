"""Register our nodes under OneDiff's ids.

A pack that loads later overwrites node ids; a pack that loaded earlier is in ComfyUI's table already. So listing our
nodes skips ids that are taken, and the start of the server, when all packs are loaded, decides on the others.
"""

from __future__ import annotations

import logging
from typing import Any

from comfy_api.latest import io

import nodes

from ..adapters.onediff import precedence
from .factory import node_of
from .table import TABLE

logger = logging.getLogger(__name__)

_OURS: dict[str, type[io.ComfyNode]] = {old.node_id: node_of(old) for old in TABLE}


def nodes_to_register() -> list[type[io.ComfyNode]]:
    """Our nodes under OneDiff's ids, except for ids that a pack has registered already."""
    return precedence.free(_OURS, nodes.NODE_CLASS_MAPPINGS)


def begin(server: Any) -> None:
    """When `server` starts to serve, remove our nodes under OneDiff's ids if OneDiff's pack is loaded.

    server: ComfyUI's PromptServer.
    """

    async def start(app: Any) -> None:
        if precedence.withdraw(_OURS, nodes.NODE_CLASS_MAPPINGS, nodes.NODE_DISPLAY_NAME_MAPPINGS):
            logger.info("Resolute: OneDiff's own nodes are loaded, so Resolute does not stand in for them")

    server.app.on_startup.append(start)
