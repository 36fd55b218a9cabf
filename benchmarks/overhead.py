"""Measures Resolute's own overhead: per replayed call, and per sampling run.

    python -m benchmarks.overhead --out benchmarks/results/FILE.json

The call is SDXL's, batch 2, with the residuals of a ControlNet. The module has as many weights (of one element) and as
many submodules as SDXL's UNet, and computes nothing. What remains is the overhead: describing the inputs, the key,
checking the weights' addresses, the lookup, and the copies in and out; and a thorough check of every module at the
first call of a run. On CUDA, tensors have their real sizes (a copy is one launch) and the graph is real. On the CPU
they have an eighth of the height and width, because a copy costs memory traffic there, and a fake graph only copies.
Uses one thread.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import rig
from .parity import load_pack_for_device

WEIGHTS = 1680
MODULES = 2034
CALLS, RUNS = 2000, 100
RESIDUALS = [(320, 1)] * 3 + [(320, 2), (640, 2), (640, 2), (640, 4), (1280, 4), (1280, 4)]


def make_module(device: str) -> Any:
    """A module with as many weights and submodules as SDXL's UNet."""
    import torch

    class Nothing(torch.nn.Module):
        __qualname__ = "Nothing"

        def _forward(self, x: Any, timesteps: Any, context: Any, y: Any, control: Any, transformer_options: Any) -> Any:
            return x * 1

    root: Any = Nothing()
    blocks = [torch.nn.LayerNorm(1, device=device) for _ in range(WEIGHTS // 2)]
    root.blocks = torch.nn.ModuleList([*blocks, *(torch.nn.Dropout() for _ in range(MODULES - len(blocks) - 2))])
    return root


def make_call(device: str) -> dict[str, Any]:
    """The keyword arguments of one call at 1024x1024, as core passes them."""
    import torch

    side = 128 if device == "cuda" else 16

    def noise(*shape: int) -> Any:
        return torch.randn(*shape, device=device, dtype=torch.float16)

    residuals = [noise(2, channels, side // step, side // step) for channels, step in RESIDUALS]
    return {
        "timesteps": torch.full((2,), 500.0, device=device),
        "context": noise(2, 77, 2048),
        "y": noise(2, 2816),
        "control": {"input": [], "middle": [noise(2, 1280, side // 4, side // 4)], "output": residuals},
        "transformer_options": {
            "cond_or_uncond": [1, 0], "uuids": [1, 2], "sigmas": torch.ones(1), "sample_sigmas": torch.ones(21),
            "patches": {}, "wrappers": {}, "callbacks": {},
        },
    }  # fmt: skip


def make_forward(module: Any, device: str) -> Any:
    """A CompiledForward of a forward that computes nothing, with a backend that replays."""
    import torch
    from resolute_pack.compile_cache.backends.base import Capabilities, Program  # type: ignore[import-not-found]
    from resolute_pack.compile_cache.keys import Role  # type: ignore[import-not-found]
    from resolute_pack.nodes.adapters.forward.compiled_forward import CompiledForward  # type: ignore[import-not-found]
    from resolute_pack.nodes.adapters.process.compile_request import CompileRequest  # type: ignore[import-not-found]

    class Copies:
        """A fake graph that copies in and out like a capture."""

        bytes = 1

        def __init__(self, tensors: Sequence[Any]) -> None:
            self._inputs = [tensor.clone() for tensor in tensors]

        def replay(self, tensors: Sequence[Any]) -> Any:
            torch._foreach_copy_(self._inputs, list(tensors))
            return self._inputs[0].clone()

        def close(self) -> None:
            pass

    class CopiesProgram(Program):  # type: ignore[misc]
        def run(self, call: Any) -> Any:
            return call.invoke(call.tensors)

        def capture(self, call: Any, result: Any, memory: Any) -> Any:
            return Copies(call.tensors)

    chosen = "cudagraph" if device == "cuda" else "eager"
    forward = CompiledForward(module, module._forward, CompileRequest.resolved(chosen, device, Role.UNET))
    if device == "cpu":
        program = CopiesProgram(forward.runner.owner, Capabilities(available=True, captures=True))
        forward.runner._programs["cpu"] = (program, "copies")
    return forward


def timed(call: Callable[[], Any], device: str, calls: int = CALLS) -> dict[str, float]:
    """Milliseconds per call: median, 10th and 90th percentile. A call's time does not include waiting for the GPU."""
    import torch

    samples = []
    for number in range(calls + 200):
        if device == "cuda" and number % 20 == 0:
            torch.cuda.synchronize()  # otherwise the launch queue fills up and a call waits for the GPU
        started = time.perf_counter()
        call()
        samples.append((time.perf_counter() - started) * 1e3)
    deciles = statistics.quantiles(samples[200:], n=10)
    return {"median_ms": statistics.median(samples[200:]), "p10_ms": deciles[0], "p90_ms": deciles[-1]}


def measure(device: str) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """The rows by name, and the final counters, which show that the calls were replays."""
    import torch
    from resolute_pack.nodes.adapters.process import runtime  # type: ignore[import-not-found]

    module, call = make_module(device), make_call(device)
    forward = make_forward(module, device)
    latent = torch.randn(2, 4, call["control"]["output"][0].shape[2], call["control"]["output"][0].shape[3])
    latent = latent.to(device, torch.float16)
    weights = forward.runner.weights
    forward.begin()
    for _ in range(3):
        forward(latent, **call)
    rows = {
        "whole call": timed(lambda: forward(latent, **call), device),
        "of it: addresses of the weights": timed(weights.refresh, device),
        "of it: description of the inputs": timed(lambda: forward.describe((latent,), call), device),
    }
    counters = runtime.cache().stats.snapshot()
    forward.end()

    def run() -> None:
        forward.weights_detached(unpatched=False)  # core detaches and reloads the model before each run
        forward.weights_loaded()
        forward.begin()
        forward(latent, **call)
        forward.end()

    rows["a sampling run of one call"] = timed(run, device, RUNS)
    return rows, counters


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ["RESOLUTE_TRUSTED_CLASSES"] = f"{__name__}.Nothing"  # or its calls would not be captured
    device = load_pack_for_device()
    import torch

    torch.set_num_threads(1)
    with torch.inference_mode():
        rows, counters = measure(device)
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "calls": CALLS,
        "counters": counters,
        "rows": rows,
    }
    for name, row in rows.items():
        print(f"{name:36}" + "  ".join(f"{key} {value:.3f}" for key, value in row.items()))
    print({key: counters[key] for key in ("replays", "captures", "eager_calls", "bypasses")})
    rig.save(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
