"""Register our nodes under OneDiff's ids.

A pack that is loaded later overwrites node ids, and one that is loaded earlier is in ComfyUI's table already. So ids
that are taken are left out when our nodes are listed, and the rest is decided when the server starts: all packs are
loaded then.
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
    """Our nodes under those of OneDiff's ids that no pack has registered so far."""
    return precedence.free(_OURS, nodes.NODE_CLASS_MAPPINGS)


def begin(server: Any) -> None:
    """Leave the ids to OneDiff's pack where it is loaded, when `server` starts to serve.

    server: ComfyUI's PromptServer.
    """

    async def start(app: Any) -> None:
        if precedence.withdraw(_OURS, nodes.NODE_CLASS_MAPPINGS, nodes.NODE_DISPLAY_NAME_MAPPINGS):
            logger.info("Resolute: OneDiff's own nodes are loaded, so Resolute does not stand in for them")

    server.app.on_startup.append(start)
