"""How far the shapes that models were used with are ready: captured, compiled, or yet to be compiled."""

from __future__ import annotations

from typing import Any

import torch

from ...compile_cache.backends import registry
from ...compile_cache.backends.base import Located
from ...compile_cache.cache import GraphCache
from ...compile_cache.keys import Role
from ...compile_cache.shape_memory import Model, Remembered

# A shape in memory runs at once; one on disk waits for its regions to load and for a capture, tenths of a second.
MEMORY, DISK, UNKNOWN = "memory", "disk", "unknown"
_CHANNELS = (4, 16)  # of latents whose cells are 8 pixels


def models(cache: GraphCache, device: torch.device) -> list[dict[str, Any]]:
    """Plain data: each model that is remembered, with the state of each shape, the latest used first."""
    captured = dict(cache.captured())
    found = []
    for model in cache.shapes.models():
        shapes = []
        for graph in reversed(model.graphs):
            entry = captured.get(graph.key)
            shapes.append(
                {
                    **graph.key.plain(),
                    "state": MEMORY if entry else _state(graph, cache, device),
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
        if shape["role"] == Role.UNET.value and len(latent) == 4 and latent[1] in _CHANNELS:
            ready[shape["state"]].append((latent[3], latent[2]))
    return list(dict.fromkeys(ready[MEMORY] or ready[DISK]))


def line(model: Model, cache: GraphCache, device: torch.device) -> str:
    """For the log at the start: "18 regions and 9 shapes ready for SDXL, 0 compiles expected"."""
    regions, ready, missing = 0, 0, 0
    for backend in {graph.key.backend for graph in model.graphs} & set(registry.NAMES):
        graphs = [graph for graph in model.graphs if graph.key.backend == backend]
        everything = frozenset[str]().union(*(graph.regions for graph in graphs))
        found = registry.get(backend).located(everything, device, cache.config)
        regions += found.in_memory + found.on_disk
        missing += found.missing
        ready += sum(_state(graph, cache, device) != UNKNOWN for graph in graphs)
    return f"{regions} regions and {ready} shapes ready for {model.name}, {missing} compiles expected"


def _state(graph: Remembered, cache: GraphCache, device: torch.device) -> str:
    if graph.key.backend not in registry.NAMES:  # of another version of this pack
        return UNKNOWN
    found = _located(graph, cache, device)
    can = registry.get(graph.key.backend).probe(device.type)
    if found.missing or not can.available or not can.returns_memory:  # what is kept for good is built anew, slowly
        return UNKNOWN
    return DISK if can.captures or found.on_disk else MEMORY


def _located(graph: Remembered, cache: GraphCache, device: torch.device) -> Located:
    return registry.get(graph.key.backend).located(graph.regions, device, cache.config)
