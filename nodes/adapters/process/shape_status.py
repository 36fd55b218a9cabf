"""The status of each shape that a model was used with: captured, compiled, or still to compile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ....compile_cache.backends import registry
from ....compile_cache.backends.base import Located
from ....compile_cache.cache.graph_cache import GraphCache
from ....compile_cache.keys import WHOLE_DIFFUSION_MODEL
from ....compile_cache.store.shape_history import Model, UsedShape
from ....compile_cache.telemetry.report_rows import size_of
from ....compile_cache.telemetry.run_summary import sides_in
from ..comfyui import latent_cells

# A shape in memory runs at once. One on disk first loads its regions and captures, which takes tenths of a second.
MEMORY, DISK, UNKNOWN = "memory", "disk", "unknown"


def locate(graphs: Iterable[UsedShape], cache: GraphCache, device: torch.device) -> dict[str, Located]:
    """Locate the regions of graphs, by backend, with one query of each store.

    Another version of ComfyUI may have other code: of its graphs, only the regions that this version ran too count.
    """
    used: dict[str, tuple[set[str], set[str]]] = {}  # by this version, and by others
    for graph in graphs:
        if graph.key.backend in registry.NAMES:  # it may come from another version of this pack
            now, before = used.setdefault(graph.key.backend, (set(), set()))
            (now if graph.application == cache.config.application else before).update(graph.regions)
    found = {name: registry.get(name).locate(frozenset(used[name][0]), device, cache.config) for name in used}
    return {name: replace(each, missing=each.missing | (used[name][1] - used[name][0])) for name, each in found.items()}


def of_model(model: str, backend: str, cache: GraphCache, device: torch.device) -> Located:
    """Locate the regions that a model has run on a backend. model: as in GraphKey."""
    graphs = [graph for graph in cache.shapes.of_model(model) if graph.key.backend == backend]
    return locate(graphs, cache, device).get(backend, Located())


def models(cache: GraphCache, device: torch.device) -> list[dict[str, Any]]:
    """Plain data: each remembered model with the readiness of its shapes ("state"), the last used first."""
    captured, known = {key.graph: entry for key, entry in cache.captured()}, cache.shapes.models()
    located = locate((graph for model in known for graph in model.graphs), cache, device)
    remembered = []
    for model in known:
        shapes = []
        for graph in reversed(model.graphs):
            entry = captured.get(graph.key)
            shapes.append(
                {
                    **graph.key.plain(),
                    "size": cache.shapes.size_of(graph.key) or graph.size,
                    "state": MEMORY if entry else _readiness(graph, located, device),
                    "bytes": entry.bytes if entry else 0,
                    "hits": entry.hits if entry else 0,
                    "seconds": graph.seconds,
                }
            )
        remembered.append({"name": model.name, "model": model.digest[:12], "shapes": shapes})
    return remembered


def sizes(cache: GraphCache, device: torch.device) -> list[tuple[int, int]]:
    """(width, height), in pixels, of pictures whose graphs are in memory, or on disk if none is in memory."""
    ready: dict[str, list[tuple[int, int]]] = {MEMORY: [], DISK: [], UNKNOWN: []}
    for shape in [*_captured(cache), *(shape for model in models(cache, device) for shape in model["shapes"])]:
        size = sides_in(shape["size"])  # in pixels, by the model's latent cells; None if unknown
        if (
            size is not None
            and shape["role"] in WHOLE_DIFFUSION_MODEL
            and latent_cells.is_picture(shape["latent_shape"])
        ):
            ready[shape["state"]].append(size)
    return list(dict.fromkeys(ready[MEMORY] or ready[DISK]))


def count_ready(remembered: Iterable[Mapping[str, Any]], cache: GraphCache) -> int:
    """Count the ready rows of the panel's tables of diffusion models, and the captured sizes that are in no table.

    remembered: from `models`.
    """
    shapes = [*_captured(cache), *(shape for model in remembered for shape in model["shapes"])]
    ready = [each for each in shapes if each["state"] == MEMORY and each["role"] in WHOLE_DIFFUSION_MODEL]
    return len({(each["model"], size_of(each)) for each in ready})


def _captured(cache: GraphCache) -> list[dict[str, Any]]:
    return [
        {**key.graph.plain(), "size": cache.shapes.size_of(key.graph), "state": MEMORY} for key, _ in cache.captured()
    ]


def line(model: Model, cache: GraphCache, device: torch.device) -> str:
    """The log line at startup: "18 regions are there for 9 sizes of SDXL, 0 compiles expected". After an update of
    ComfyUI nobody knows yet which blocks it changed.
    """
    located = locate(model.graphs, cache, device)
    regions = sum(len(found.in_memory) + len(found.on_disk) for found in located.values())
    missing = sum(len(found.missing) for found in located.values())
    sizes = {
        size_of({**graph.key.plain(), "size": graph.size})
        for graph in model.graphs
        if _readiness(graph, located, device) != UNKNOWN
    }
    is_other = any(graph.application != cache.config.application for graph in model.graphs)
    expected = f"at most {missing} compiles expected in this ComfyUI" if is_other else f"{missing} compiles expected"
    return f"{regions} regions are there for {len(sizes)} sizes of {model.name}, {expected}"


def _readiness(graph: UsedShape, located: Mapping[str, Located], device: torch.device) -> str:
    found = located.get(graph.key.backend)
    if found is None:
        return UNKNOWN
    can = registry.get(graph.key.backend).probe(device.type)
    compiled = graph.regions.isdisjoint(found.missing)
    if not compiled or not can.available or can.keeps_graphs:  # graphs of such a backend are rebuilt, slowly
        return UNKNOWN
    return DISK if can.captures or not graph.regions.isdisjoint(found.on_disk) else MEMORY
