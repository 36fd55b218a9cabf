"""Decide who owns OneDiff's node ids: OneDiff's pack if it is loaded, else this one. Plain tables: no ComfyUI."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

# Every version of OneDiff's pack registers this id, and hardly any other pack does.
_SIGN_OF_ONEDIFF = "ModelSpeedup"


def free(ours: Mapping[str, type], classes: Mapping[str, Any]) -> list[type]:
    """Our nodes whose id no pack has registered so far.

    ours, classes: node classes by id; `classes` is ComfyUI's table.
    """
    return [node for node_id, node in ours.items() if node_id not in classes]


def withdraw(ours: Mapping[str, type], classes: MutableMapping[str, Any], titles: MutableMapping[str, str]) -> bool:
    """If OneDiff's pack is loaded, remove all of `ours`, because our nodes cannot use its boosters.

    classes, titles: ComfyUI's tables of nodes and display names, by id, when all packs are loaded. Returns whether
    OneDiff's pack is loaded.
    """
    found = classes.get(_SIGN_OF_ONEDIFF)
    if found is None or found is ours[_SIGN_OF_ONEDIFF]:
        return False
    for node_id, node in ours.items():
        if classes.get(node_id) is node:
            del classes[node_id]
            titles.pop(node_id, None)
    return True
