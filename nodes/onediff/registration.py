"""Decide which of OneDiff's node ids are ours, and register our nodes as replacements with ComfyUI.

A pack that is loaded later overwrites node ids, and one that is loaded earlier is in ComfyUI's table already. So ids
that are taken are left out when our nodes are listed, and the rest is decided when the server starts: all packs are
loaded then.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any

from comfy_api.latest import io

import nodes

from ..adapters.comfyui.node_replacements import Replacement, register
from . import boosters, images, loaders, speedups, without_meaning
from .replacements import ONEDIFF, SUGGESTED

logger = logging.getLogger(__name__)

NODES: tuple[type[io.ComfyNode], ...] = (
    *speedups.NODES,
    *loaders.NODES,
    *boosters.NODES,
    *without_meaning.NODES,
    *images.NODES,
)
# Every version of OneDiff's pack registers this id, and hardly any other pack does.
_SIGN_OF_ONEDIFF = "ModelSpeedup"
_begun = False


def nodes_to_register() -> list[type[io.ComfyNode]]:
    """Our nodes under those of OneDiff's ids that no pack has registered so far."""
    taken: Mapping[str, Any] = nodes.NODE_CLASS_MAPPINGS
    return [each for each in NODES if each.define_schema().node_id not in taken]


def begin(server: Any) -> None:
    """Settle the ids and register the replacements when `server` (ComfyUI's PromptServer) starts to serve."""
    global _begun
    if _begun:
        return
    _begun = True

    async def start(app: Any) -> None:
        withdraw_if_onediff_is_loaded(nodes.NODE_CLASS_MAPPINGS, nodes.NODE_DISPLAY_NAME_MAPPINGS)
        await register(replacements(nodes.NODE_CLASS_MAPPINGS))

    server.app.on_startup.append(start)


def withdraw_if_onediff_is_loaded(classes: MutableMapping[str, Any], titles: MutableMapping[str, str]) -> None:
    """Where OneDiff's pack is loaded, remove all of ours, because its boosters mean nothing to our nodes.

    classes, titles: ComfyUI's tables of nodes and display names, by node id.
    """
    found = classes.get(_SIGN_OF_ONEDIFF)
    if found is None or found in NODES:
        return
    for each in NODES:
        node_id = each.define_schema().node_id
        if classes.get(node_id) is each:
            del classes[node_id]
            titles.pop(node_id, None)
    logger.info("Resolute: OneDiff's own nodes are loaded, so Resolute does not stand in for them")


def replacements(classes: Mapping[str, Any]) -> list[Replacement]:
    """The replacements that ComfyUI may offer.

    ComfyUI replaces a node by itself if its type is missing. Torch-compile nodes of core and of KJNodes are suggestions
    only, so they are registered only where their types are loaded.
    """
    return [*ONEDIFF, *(each for each in SUGGESTED if each.old_id in classes)]
