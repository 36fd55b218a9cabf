"""Measures OneFlow graphs: build time per size, steady time against torch, and memory as the number of sizes grows.

Run it in the environment of `scripts/test --oneflow`, with ComfyUI's folder in COMFYUI_PATH:

    python -m benchmarks.oneflow --out benchmarks/results/FILE.json

A process measures one model, because a graph's memory is never returned. `--full` measures SD1.5's own UNet
(860 M parameters) instead of a small one.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from compile_cache.backends.base import Call
from compile_cache.backends.oneflow.backend import OneFlowBackend
from compile_cache.backends.oneflow.packages import installed
from compile_cache.backends.oneflow.runtime import memory_in_use
from compile_cache.calls.cache import GraphCache
from compile_cache.config import CacheConfig
from compile_cache.keys import GraphKey, Role, Signature, TensorSpec

from . import rig

MIB = 1024 * 1024
# Width and height in pixels; some have latents with odd sides.
SIZES = [(128, 128), (256, 128), (128, 256), (152, 136), (192, 192), (240, 184), (184, 240), (224, 192), (256, 256)]
FULL_SIZES = [(256, 256), (240, 184), (128, 128)]
REPEATS = 5
MINI = {
    "model_channels": 64, "num_res_blocks": [1, 1, 1], "channel_mult": [1, 2, 2], "transformer_depth": [1, 1, 0],
    "transformer_depth_output": [1, 1, 1, 1, 0, 0],
}  # fmt: skip


def unet(**changes: Any) -> Any:
    """ComfyUI's UNet of the SD1.5 family with random weights, float32 on the CPU."""
    import comfy.ops
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    from scripts.models.architectures import SD15

    module = UNetModel(**{**SD15, **changes}, dtype=torch.float32, operations=comfy.ops.disable_weight_init)
    generator = torch.Generator().manual_seed(0)
    for weight in module.parameters():
        fan_in = weight[0].numel() if weight.ndim > 1 else 1
        weight.data = torch.randn(weight.shape, generator=generator) * (fan_in**-0.5 if weight.ndim > 1 else 0.1)
    return module.eval().requires_grad_(False)


class Measured:
    """Runs one module through the cache and times its calls."""

    def __init__(self, module: Any) -> None:
        backend = OneFlowBackend()
        self._module = module
        self.cache = GraphCache(CacheConfig(budget_bytes=64 * 1024 * MIB))
        self._program = backend.bind(1, backend.probe("cpu"), lambda *_: [], self.cache.stats, self.cache.config)

    def call(self, width: int, height: int) -> Call:
        tensors = [torch.randn(1, 4, height // 8, width // 8), torch.full((1,), 500.0), torch.randn(1, 77, 768)]
        specs = tuple((str(i), TensorSpec(tuple(x.shape), "float32", "cpu")) for i, x in enumerate(tensors))

        def invoke(given: Any) -> Any:
            return self._module._forward(given[0], timesteps=given[1], context=given[2], transformer_options={})

        key = GraphKey(Signature(specs), Role.UNET, "benchmark", "oneflow")
        return Call(key, tensors, invoke, "cpu", epoch=1, module=self._module)

    def run(self, width: int, height: int) -> dict[str, Any]:
        """Time the first call, which builds a graph, then replays and torch's own calls."""
        call = self.call(width, height)
        expected, _ = timed(lambda: call.invoke(call.tensors))
        _, first = timed(lambda: self.cache.run(self._program, call))
        result, _ = timed(lambda: self.cache.run(self._program, call))
        replays = [timed(lambda: self.cache.run(self._program, call))[1] for _ in range(REPEATS)]
        torch_times = [timed(lambda: call.invoke(call.tensors))[1] for _ in range(REPEATS)]
        counters = self.cache.report()["counters"]
        assert counters["replays"] > 0, counters["bypasses"]
        return {
            "size": f"{width}x{height}",
            "first_call_seconds": first,
            "graph_seconds": replays,
            "torch_seconds": torch_times,
            "graph_median": statistics.median(replays),
            "torch_median": statistics.median(torch_times),
            "relative_error": float((result - expected).norm() / expected.norm()),
            "resident_mib": memory_in_use(torch.device("cpu")) // MIB,
            "graphs": counters["captures"],
            "graphs_mib": self.cache.bytes // MIB,
        }


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    with torch.inference_mode():
        result = function()
    return result, time.perf_counter() - started


def measure(name: str, module: Any, sizes: list[tuple[int, int]]) -> dict[str, Any]:
    """Measure all sizes one after the other, then drop all graphs."""
    before = memory_in_use(torch.device("cpu")) // MIB
    bench = Measured(module)
    rows = []
    for size in sizes:
        rows.append(bench.run(*size))
        told = {key: value for key, value in rows[-1].items() if not isinstance(value, list)}
        print(name, told, flush=True)
    bench.cache.forget(1)
    gc.collect()
    return {
        "model": name,
        "parameters": sum(weight.numel() for weight in module.parameters()),
        "resident_mib_before": before,
        "rows": rows,
        "resident_mib_after_letting_all_go": memory_in_use(torch.device("cpu")) // MIB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.oneflow", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--full", action="store_true", help="SD1.5's own UNet instead of a small one")
    options = parser.parse_args()
    sys.path.insert(0, os.environ.get("COMFYUI_PATH", ".comfyui"))
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    if options.full:
        measured = measure("SD1.5", unet(), FULL_SIZES)
    else:
        measured = measure("SD1.5-like, small", unet(**MINI), SIZES)
    document = {
        "machine": f"{os.cpu_count()}-core CPU, shared with other work",
        "load_average_at_the_end": os.getloadavg(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "oneflow": installed(),
        "date": datetime.date.today().isoformat(),
        **measured,
    }
    rig.save(options.out, document)


if __name__ == "__main__":
    main()
