"""ComfyUI's own migration of nodes (`node_replacement.register`, absent in 0.8)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import comfy_api.latest as api

logger = logging.getLogger(__name__)

_MOST_OUTPUTS = 3  # of the nodes that are replaced: a loader has three


@dataclass(frozen=True, slots=True)
class Replacement:
    """`new_id` can take the place of `old_id`, with the same outputs.

    old_widgets: the old node's widgets in their order, since a workflow stores only their values. inputs: input of the
    new node -> input of the old one. values: input of the new node -> its value.

    Name only required inputs of the old node in `inputs`: ComfyUI's migration fails on one that a prompt leaves out.
    """

    old_id: str
    new_id: str
    old_widgets: tuple[str, ...] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)


async def register(replacements: Iterable[Replacement]) -> bool:
    """Offer the replacements to ComfyUI. Returns False where ComfyUI has no such migration."""
    make = getattr(api.io, "NodeReplace", None)
    offers = getattr(api.ComfyAPI(), "node_replacement", None) if hasattr(api, "ComfyAPI") else None
    if make is None or offers is None:
        logger.debug("Resolute: this ComfyUI has no migration of nodes")
        return False
    for each in replacements:
        mapping: list[dict[str, Any]] = [{"new_id": new, "old_id": old} for new, old in each.inputs.items()]
        mapping += [{"new_id": new, "set_value": value} for new, value in each.values.items()]
        await offers.register(
            make(
                new_node_id=each.new_id,
                old_node_id=each.old_id,
                old_widget_ids=list(each.old_widgets) or None,
                input_mapping=mapping,
                output_mapping=[{"new_idx": index, "old_idx": index} for index in range(_MOST_OUTPUTS)],
            )
        )
    return True
