"""The data that `GET /resolute/cache` and Graph Cache Report show, and the text of a bug report."""

from __future__ import annotations

import sys
from typing import Any

import comfy.model_management
import torch

from ....compile_cache.attention.chooser import chooser
from ....compile_cache.backends import registry
from ....compile_cache.telemetry import report_rows
from ....compile_cache.telemetry.rows import failed_text
from ....compile_cache.texts import words_of
from ..comfyui import version
from ..comfyui.background_progress import compile_eta, failed
from ..comfyui.messages import going_on
from ..comfyui.quantization import formats_in_words
from ..process import runtime, shape_status, user_settings
from . import runs, stock_measurements

_RUNS_IN_TEXT = 20


def report() -> dict[str, Any]:
    """The state of the cache, as JSON: its own report, and twelve more fields.

    coming: regions still to compile, and about how many seconds that takes; null until the first one is compiled. Also
    the badge's message, as `left`, `text` and `words`. working: the work that the prompt waits for, or null. failed:
    how many regions failed to compile. Both have a `text` and `words` too.
    regions_ready: compiled regions in memory, each counted once for all models: the count that people see. sizes_ready:
    sizes of diffusion models that run at once. modules: for each compiled module, its compiled regions, its blocks by
    how they were recognised, the names of blocks that the user left out, and what computes its quantized weights.
    store: regions on disk, and their bytes.
    models: for each remembered model and shape, whether it is ready in memory or on disk. attention: the kernel of each
    shape that was measured. whole_calls: calls that were compared, with their seconds compiled and eager. device: see
    `_device`. measurements: the results of *Measure against stock* on this device.
    """
    cache, programs = runtime.cache(), runtime.programs()
    modules = [
        {
            "module": owner,
            "backend": backend,
            "regions_compiled": program.regions[0],
            "regions": program.regions[1],
            "blocks": program.blocks,
            "formats": formats_in_words(program.quantized, runtime.device()),
            "left_out": list(left_out),
        }
        for (owner, backend, left_out, _), program in programs.items()
    ]
    models = shape_status.models(cache, runtime.device())  # opens the store, also before any model is loaded
    stored = {what: number for name in registry.NAMES for what, number in registry.get(name).stored().items()}
    regions, seconds = compile_eta()
    reasons = failed()
    why = failed_text(reasons)
    return {
        **cache.report(),
        "coming": {"regions": regions, "seconds": seconds and round(seconds, 1), **going_on.get("coming", {})},
        "working": going_on.get("working"),
        "failed": {"regions": len(reasons), "text": why or "", "words": words_of(why or "")},
        "regions_ready": sum(registry.get(name).ready_regions() for name in registry.NAMES),
        "sizes_ready": shape_status.count_ready(models, cache),
        "modules": modules,
        "store": stored,
        "models": models,
        "attention": chooser.report(),
        "whole_calls": cache.compiled_vs_eager.report(),
        "device": _device(),
        "measurements": stock_measurements.here(),
    }


def _device() -> dict[str, Any]:
    """The device that runs models: its name, whether it makes captures, and its memory in bytes."""
    where = runtime.device()
    management = comfy.model_management
    return {
        "name": runtime.device_name(),
        "captures": where.type == "cuda" and runtime.cache().config.capture,
        "total_bytes": int(management.get_total_memory(where)),
        "free_bytes": int(management.get_free_memory(where)),
    }


def ready_sizes() -> list[tuple[int, int]]:
    """(width, height) in pixels of the captured sizes; if there are none, of those whose regions are on disk."""
    return shape_status.sizes(runtime.cache(), runtime.device())


def text() -> str:
    """The text of a bug report: the machine, the settings, the report for people and the latest runs."""
    data, settings = report(), user_settings.all_set()
    python = sys.version.split()[0]
    lines = [
        f"Resolute {version.of_this_pack()}, ComfyUI {version.of_comfyui()}, torch {torch.__version__}, "
        f"Python {python}, {sys.platform}, on {data['device']['name']}",
        "settings: " + (", ".join(f"{name}={value}" for name, value in sorted(settings.items())) or "all at default"),
        "",
        report_rows.report(data),
        "",
    ]
    for run in runs.latest()[-_RUNS_IN_TEXT:]:
        lines.append(f"{run['model']} {run['role']}: {run['status']}".replace("\n", "; "))
        lines += [f"  {reason}" for reason in run["reasons"]]
    return "\n".join(lines)
