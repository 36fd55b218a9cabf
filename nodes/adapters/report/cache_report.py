"""What `GET /resolute/cache` and Graph Cache Report tell of the process's cache."""

from __future__ import annotations

from typing import Any

from ....compile_cache.backends import registry
from ..process import runtime
from ..restart import shape_status


def report() -> dict[str, Any]:
    """The cache's report, with the regions of each module that has a program."""
    cache, programs = runtime.cache(), runtime.programs()
    modules = [
        {"module": owner, "backend": backend, "regions_compiled": program.regions[0], "regions": program.regions[1]}
        for (owner, backend), program in programs.items()
    ]
    stored: dict[str, int] = {}
    for name in {backend for _, backend in programs}:
        stored |= registry.get(name).stored()
    models = shape_status.models(cache, runtime.device())
    return {**cache.report(), "modules": modules, "store": stored, "models": models}


def ready_sizes() -> list[tuple[int, int]]:
    """(width, height) of latents that a diffusion model samples without a stall; see `shape_status.sizes`."""
    return shape_status.sizes(runtime.cache(), runtime.device())
