"""A node pack for benchmarks: a node that times each call of a model and profiles the last ones."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.memory_management
import folder_paths
import torch

_HAS_CUDA = torch.cuda.is_available()
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
                "profiled": ("INT", {"default": 0, "min": 0, "max": 100}),
            }
        }

    def watch(self, model: Any, name: str, calls: int, profiled: int) -> tuple[Any]:
        """profiled: how many of the last calls run under torch's profiler, which slows them down."""
        clone = model.clone()
        clone.set_model_unet_function_wrapper(Watch(name, calls, profiled, clone.model))
        return (clone,)


class Watch:
    """model: core's, whose weights may be paged."""

    def __init__(self, name: str, calls: int, profiled: int, model: Any) -> None:
        self._model = model
        self._path = Path(folder_paths.get_output_directory()) / f"{name}.json"
        self._calls, self._profiled = calls, profiled
        self._rows: list[dict[str, Any]] = []
        self._marks: list[Any] = []
        self._profiles: list[dict[str, Any]] = []
        self._last = 0.0

    def __call__(self, apply: Callable[..., Any], given: dict[str, Any]) -> Any:
        def run() -> Any:
            return apply(given["input"], given["timestep"], **given["c"])

        is_profiled = len(self._rows) >= self._calls - self._profiled
        started = time.perf_counter()
        row = {"since_last_ms": 1000 * (started - self._last), "is_profiled": is_profiled}
        self._last = started
        if is_profiled:
            result, profile = profile_of(run)
            self._profiles.append(profile)
        else:
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if _HAS_CUDA else []
            if marks:
                marks[0].record()
            result = run()
            if marks:
                marks[1].record()
            self._marks.append(marks)
            row["host_ms"] = 1000 * (time.perf_counter() - started)
        self._rows.append(row)
        if len(self._rows) == self._calls:
            self._write()
        return result

    def _write(self) -> None:
        if _HAS_CUDA:
            torch.cuda.synchronize()
        for row, marks in zip(self._rows, self._marks, strict=False):
            if marks:
                row["gpu_ms"] = marks[0].elapsed_time(marks[1])
        written = {"calls": self._rows, "profiles": self._profiles, "not_resident_bytes": not_resident(self._model)}
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


def profile_of(run: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """The result, and what ran on the GPU: {kernel: [count, microseconds]} and the milliseconds that it was busy."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if _HAS_CUDA else activity.CPU]) as profiler:
        result = run()
        if _HAS_CUDA:
            torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    spans: list[tuple[float, float]] = []
    host: dict[str, list[float]] = {}
    for event in profiler.events() or ():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        entry = (kernels if on_device else host).setdefault(event.name[:300], [0, 0.0])
        entry[0] += 1
        entry[1] += event.time_range.elapsed_us()
        if on_device:
            spans.append((event.time_range.start, event.time_range.end))
    busy, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        busy += max(last - max(first, end), 0.0)
        end = max(end, last)
    span = end - min(spans)[0] if spans else 0.0
    return result, {"busy_ms": busy / 1000, "span_ms": span / 1000, "kernels": kernels, "host": host}


NODE_CLASS_MAPPINGS = {"ResoluteBenchmarkSteps": ResoluteBenchmarkSteps}
