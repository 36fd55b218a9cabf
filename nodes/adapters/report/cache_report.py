"""The data that `GET /resolute/cache` and Graph Cache Report show."""

from __future__ import annotations

from typing import Any

from ....compile_cache.attention.chooser import chooser
from ....compile_cache.backends import registry
from ..comfyui import latent_cells
from ..process import runtime
from ..restart import shape_status


def report() -> dict[str, Any]:
    """The state of the cache, as JSON: its own report, and four more fields.

    modules: for each compiled module, how many of its regions are compiled, its blocks by how they were found, and the
    names of blocks that the user left out. store: regions kept on disk, and their bytes. models: for each remembered
    model and shape, whether it is ready in memory or on disk. attention: the kernel of each shape that was
    measured.
    """
    cache, programs = runtime.cache(), runtime.programs()
    modules = [
        {
            "module": owner,
            "backend": backend,
            "regions_compiled": program.regions[0],
            "regions": program.regions[1],
            "blocks": program.blocks,
            "left_out": list(left_out),
        }
        for (owner, backend, left_out), program in programs.items()
    ]
    models = shape_status.models(cache, runtime.device())  # opens the store, also before any model is loaded
    stored: dict[str, int] = {}
    for name in registry.NAMES:
        stored |= registry.get(name).stored()
    return {
        **cache.report(),
        "modules": modules,
        "store": stored,
        "models": models,
        "attention": chooser.report(),
    }


def ready_sizes() -> list[tuple[int, int]]:
    """(width, height) in pixels of the captured sizes; if there are none, of those whose regions are on disk."""
    found = shape_status.sizes(runtime.cache(), runtime.device())
    return [(latent_cells.DEFAULT * width, latent_cells.DEFAULT * height) for width, height in found]
