"""How far the shapes that models were used with are ready: captured, compiled, or yet to be compiled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ....compile_cache.backends import registry
from ....compile_cache.backends.base import Located
from ....compile_cache.cache import GraphCache
from ....compile_cache.keys import WHOLE_DIFFUSION_MODEL
from ....compile_cache.store.shape_history import Model, UsedShape

# A shape in memory runs at once; one on disk waits for its regions to load and for a capture, tenths of a second.
MEMORY, DISK, UNKNOWN = "memory", "disk", "unknown"
_CHANNELS = (4, 16)  # of latents whose cells are 8 pixels


def locate(graphs: Iterable[UsedShape], cache: GraphCache, device: torch.device) -> dict[str, Located]:
    """Where the regions of graphs are, by backend: one look at each store."""
    regions: dict[str, frozenset[str]] = {}
    for graph in graphs:
        if graph.key.backend in registry.NAMES:  # it may be of another version of this pack
            regions[graph.key.backend] = regions.get(graph.key.backend, frozenset()) | graph.regions
    return {name: registry.get(name).located(keys, device, cache.config) for name, keys in regions.items()}


def models(cache: GraphCache, device: torch.device) -> list[dict[str, Any]]:
    """Plain data: each model that is remembered, with the state of each shape, the latest used first."""
    captured, known = dict(cache.captured()), cache.shapes.models()
    located = locate((graph for model in known for graph in model.graphs), cache, device)
    found = []
    for model in known:
        shapes = []
        for graph in reversed(model.graphs):
            entry = captured.get(graph.key)
            shapes.append(
                {
                    **graph.key.plain(),
                    "state": MEMORY if entry else _state(graph, located, device),
                    "bytes": entry.bytes if entry else 0,
                    "hits": entry.hits if entry else 0,
                    "seconds": graph.seconds,
                }
            )
        found.append({"name": model.name, "model": model.digest[:12], "shapes": shapes})
    return found


def sizes(cache: GraphCache, device: torch.device) -> list[tuple[int, int]]:
    """(width, height) of the latents of diffusion models that are in memory; of those on disk where there are none."""
    ready: dict[str, list[tuple[int, int]]] = {MEMORY: [], DISK: [], UNKNOWN: []}
    captured = [{**graph.plain(), "state": MEMORY} for graph, _ in cache.captured()]
    for shape in [*captured, *(shape for model in models(cache, device) for shape in model["shapes"])]:
        latent = shape["latent_shape"]
        if shape["role"] in WHOLE_DIFFUSION_MODEL and len(latent) == 4 and latent[1] in _CHANNELS:
            ready[shape["state"]].append((latent[3], latent[2]))
    return list(dict.fromkeys(ready[MEMORY] or ready[DISK]))


def line(model: Model, cache: GraphCache, device: torch.device) -> str:
    """For the log at the start: "18 regions and 9 shapes ready for SDXL, 0 compiles expected"."""
    located = locate(model.graphs, cache, device)
    regions = sum(len(found.in_memory) + len(found.on_disk) for found in located.values())
    missing = sum(len(found.missing) for found in located.values())
    ready = sum(_state(graph, located, device) != UNKNOWN for graph in model.graphs)
    return f"{regions} regions and {ready} shapes ready for {model.name}, {missing} compiles expected"


def _state(graph: UsedShape, located: Mapping[str, Located], device: torch.device) -> str:
    found = located.get(graph.key.backend)
    if found is None:
        return UNKNOWN
    can = registry.get(graph.key.backend).probe(device.type)
    compiled = graph.regions.isdisjoint(found.missing)
    if not compiled or not can.available or not can.returns_memory:  # what is kept for good is built anew, slowly
        return UNKNOWN
    return DISK if can.captures or not graph.regions.isdisjoint(found.on_disk) else MEMORY
