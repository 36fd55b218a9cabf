"""A node pack for benchmarks: a node that times each call of a model."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.memory_management
import folder_paths
import torch

_PAGE = 32 << 20  # of comfy-aimdo


class ResoluteBenchmarkSteps:
    """Behind the compile node. Writes `name`.json to the output folder after the last of `calls` calls."""

    CATEGORY = "resolute/benchmark"
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "watch"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL",),
                "name": ("STRING", {"default": "steps"}),
                "calls": ("INT", {"default": 20, "min": 1, "max": 1000}),
            }
        }

    def watch(self, model: Any, name: str, calls: int) -> tuple[Any]:
        clone = model.clone()
        clone.set_model_unet_function_wrapper(Watch(name, calls, clone.model))
        return (clone,)


class Watch:
    """model: core's, whose weights may be paged."""

    def __init__(self, name: str, calls: int, model: Any) -> None:
        self._model = model
        self._path = Path(folder_paths.get_output_directory()) / f"{name}.json"
        self._calls = calls
        self._rows: list[dict[str, float]] = []
        self._last = 0.0

    def __call__(self, apply: Callable[..., Any], given: dict[str, Any]) -> Any:
        started = time.perf_counter()
        since_last, self._last = started - self._last, started
        result = apply(given["input"], given["timestep"], **given["c"])
        host = time.perf_counter() - started
        self._rows.append({"since_last_ms": 1000 * since_last, "host_ms": 1000 * host})
        if len(self._rows) == self._calls:
            self._write()
        return result

    def _write(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        written = {"calls": self._rows, "not_resident_bytes": not_resident(self._model)}
        self._path.write_text(json.dumps(written), "utf-8")


def not_resident(model: Any) -> int:
    """Bytes of the paged weights without pages on the device: stock ComfyUI streams them in each step."""
    return sum(
        comfy.memory_management.vram_aligned_size([module.weight, module.bias])
        for module in model.modules()
        if "_v" in module.__dict__ and not _has_pages(*module._v)
    )


def _has_pages(reservation: Any, address: int, size: int) -> bool:
    start = address - reservation.base_addr
    pages = reservation.get_residency()[start // _PAGE : -(-(start + size) // _PAGE)]
    return bool(pages) and all(flags & 1 for flags in pages)


NODE_CLASS_MAPPINGS = {"ResoluteBenchmarkSteps": ResoluteBenchmarkSteps}
