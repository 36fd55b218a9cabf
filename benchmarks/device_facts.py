"""Facts about a GPU that plans rest on: its bus, attention by shape, and which quantized products a CUDA graph holds.

    COMFYUI_PATH=... python -m benchmarks.device_facts --out benchmarks/results/NAME-device-facts.json

`bus`: GB/s between host and device, pinned and pageable. `attention`: for each shape, each kernel's milliseconds with
and without launching it, its error against fp32, and how long choosing takes. `products`: each product at TOKENS x
WIDTH x 4 WIDTH, eager and as a replayed graph. `layouts`: a feed-forward of two of core's mixed-precision Linear for
each of its quantized layouts. `replay_error` compares a replay with eager at other inputs than the captured ones,
`error` with bf16. What fails has `failed` instead. `profiled_kernels`: what torch's profiler sees in a replay.
Needs CUDA.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from compile_cache.attention.chooser import Chooser
from compile_cache.attention.kernels import Given, kernels_for
from compile_cache.attention.timing import seconds_of

TOKENS, WIDTH = 4608, 3072
RUNS = 20
Run = Callable[[torch.Tensor], torch.Tensor]


def bus() -> dict[str, float]:
    size = 1 << 30
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    rates = {}
    for name, is_pinned in (("pinned", True), ("pageable", False)):
        host = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned).fill_(1)
        for way, target, source in (("to_device", device, host), ("to_host", host, device)):
            seconds = timed(lambda t=target, s=source: t.copy_(s, non_blocking=True), 4) / 1000  # type: ignore[misc]
            rates[f"{name}_{way}"] = size / seconds / 1e9
    return rates


def timed(run: Callable[[], Any], runs: int = RUNS) -> float:
    """Milliseconds of a run, the median."""
    run()
    found = []
    for _ in range(runs):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        run()
        after.record()
        after.synchronize()
        found.append(before.elapsed_time(after))
    return statistics.median(found)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def facts(run: Run, exact: Run | None = None) -> dict[str, Any]:
    """Eager and captured."""
    found: dict[str, Any] = {}
    # Drawn on the host: a capture that breaks leaves the GPU's generator in capture mode.
    x, y = (torch.randn(TOKENS, WIDTH).to("cuda", torch.bfloat16) for _ in range(2))
    try:
        found["eager_ms"] = timed(lambda: run(x))
        if exact is not None:
            found["error"] = relative(run(x), exact(x))
        given, stream, graph = x.clone(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(given)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            result = run(given)
        found["replay_ms"] = timed(graph.replay)
        given.copy_(y)
        graph.replay()
        found["replay_error"] = relative(result, run(y))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            graph.replay()
            torch.cuda.synchronize()
        on_device = torch.autograd.DeviceType.CUDA
        found["profiled_kernels"] = [e.name[:80] for e in profiler.events() or () if e.device_type == on_device]
    except Exception as error:  # noqa: BLE001 (that it fails is the fact)
        causes = [error, error.__context__, getattr(error.__context__, "__context__", None)]
        found["failed"] = [f"{type(each).__name__}: {str(each).splitlines()[0][:300]}" for each in causes if each]
    return found


# Batch, heads, tokens, tokens of the context (0: the same), width of a head, dtype.
_HALF, _BF16 = torch.float16, torch.bfloat16
ATTENTION = [
    *((2, 10, tokens, 0, 64, _HALF) for tokens in (1024, 2025, 4096, 9216)),
    *((2, 20, tokens, 0, 64, _HALF) for tokens in (256, 529, 1024, 2304)),
    *((2, 10, tokens, 77, 64, _HALF) for tokens in (2025, 4096)),
    *((2, 20, tokens, context, 64, _HALF) for tokens, context in ((529, 77), (1024, 77), (1024, 154))),
    *((2, 8, tokens, 0, width, _HALF) for tokens, width in ((4096, 40), (1024, 80), (256, 160))),
    *((1, 24, tokens, 0, 128, _BF16) for tokens in (1280, 2560, 4608, 9216)),
    *((1, 30, tokens, 0, 128, _BF16) for tokens in (160, 2112, 4224)),
    *((1, 12, tokens, context, 128, _BF16) for tokens, context in ((14040, 0), (14040, 512), (7020, 0))),
    (1, 40, 32760, 0, 128, _BF16),
]


def attention() -> list[dict[str, Any]]:
    rows = []
    for batch, heads, tokens, context, width, dtype in ATTENTION:
        lengths = (tokens, context or tokens, context or tokens)
        q, k, v = (torch.randn(batch, n, heads, width, device="cuda", dtype=dtype).transpose(1, 2) for n in lengths)
        row: dict[str, Any] = {"shape": [batch, heads, tokens, context, width, str(dtype)], "ms": {}, "failed": {}}
        few = [each[:1, :1].float() for each in (q, k, v)]
        exact = torch.nn.functional.scaled_dot_product_attention(*few)
        row["error"] = {}
        for name, kernel in kernels_for(q.device).items():
            try:
                started = time.perf_counter()
                row["error"][name] = relative(kernel(Given(q, k, v))[:1, :1], exact)
                row.setdefault("first_ms", {})[name] = 1000 * (time.perf_counter() - started)
                run = functools.partial(kernel, Given(q, k, v))
                row["ms"][name] = [1000 * seconds_of(run, q.device) for _ in range(3)]
                row.setdefault("launched_ms", {})[name] = timed(run, 10)
            except Exception as error:  # noqa: BLE001
                row["failed"][name] = str(error).splitlines()[0][:200]
        chooser, started = Chooser(), time.perf_counter()
        chooser(Given(q, k, v))
        torch.cuda.synchronize()
        row |= {"measuring_ms": 1000 * (time.perf_counter() - started), "chosen": chooser.report()[0]["kernel"]}
        rows.append(row)
    return rows


def products() -> dict[str, Any]:
    weight = torch.randn(4 * WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16) * WIDTH**-0.5
    fp8, one = torch.float8_e4m3fn, torch.ones((), device="cuda")
    weight_8, weight_i = weight.to(fp8), (weight * 1000).round().clamp(-127, 127).to(torch.int8)
    rows = torch.ones(4 * WIDTH, 1, device="cuda")
    fast: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}

    def rowwise(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True).float() / 448
        return torch._scaled_mm((x / scale).to(fp8), weight_8.t(), scale_a=scale, scale_b=rows.t(), **fast)

    return {
        "bf16": facts(lambda x: x @ weight.t()),
        "scaled_mm fp8": facts(lambda x: torch._scaled_mm(x.to(fp8), weight_8.t(), scale_a=one, scale_b=one, **fast)),
        "scaled_mm fp8 by row": facts(rowwise),
        "int_mm": facts(lambda x: torch._int_mm((x * 30).round().to(torch.int8), weight_i.t())),
    }


def layouts() -> dict[str, Any]:
    """Core's own layouts, through its own modules."""
    sys.path.insert(0, os.environ["COMFYUI_PATH"])
    sys.argv = sys.argv[:1]
    importlib.import_module("comfy.options").enable_args_parsing(False)
    core, quantized = importlib.import_module("comfy.ops"), importlib.import_module("comfy.quant_ops")

    class FeedForward(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            operations = core.mixed_precision_ops(compute_dtype=torch.bfloat16)
            kinds = {"device": "cuda", "dtype": torch.bfloat16, "bias": False}
            self.up, self.down = (
                operations.Linear(WIDTH, 4 * WIDTH, **kinds),
                operations.Linear(4 * WIDTH, WIDTH, **kinds),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
            return result

    torch.manual_seed(0)
    shapes = {"up": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH)}
    weights = {n: torch.randn(*s, device="cuda", dtype=torch.bfloat16) * s[1] ** -0.5 for n, s in shapes.items()}

    def exact(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x @ weights["up"].t()) @ weights["down"].t()

    found = {"bf16": facts(exact)}
    for name, algorithm in quantized.QUANT_ALGOS.items():
        layout = algorithm["comfy_tensor_layout"]
        is_fp8 = "FP8" in layout and "MX" not in layout
        module = FeedForward().eval().requires_grad_(False)
        try:
            for part, weight in weights.items():
                linear = getattr(module, part)
                linear.layout_type, linear.quant_format = layout, name
                extra = {"scale": "recalculate"} if is_fp8 else {}
                made = quantized.QuantizedTensor.from_float(weight, layout, **extra)
                linear.weight = torch.nn.Parameter(made, requires_grad=False)
        except Exception as error:  # noqa: BLE001
            found[name] = {"failed": f"cannot be made: {str(error).splitlines()[0][:300]}"}
            continue
        found[name] = facts(module, exact)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "shape": [TOKENS, WIDTH, 4 * WIDTH],
    }
    with torch.inference_mode():
        for name, part in (("bus", bus), ("attention", attention), ("products", products), ("layouts", layouts)):
            try:
                result[name] = part()
            except Exception as error:  # noqa: BLE001
                result[name] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
            print(name, json.dumps(result[name]), flush=True)
            if options.out:
                options.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
