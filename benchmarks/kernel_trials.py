"""Times ways to compute the blocks of SDXL, Flux and LTX beside the present one, in one process.

    COMFYUI_PATH=... python -m benchmarks.kernel_trials --out benchmarks/results/NAME-kernel-trials.json [--seconds 150]
                                       [--family Flux LTX] [--variants before present]

`blocks`: regions of SDXL at 1024x1024 (batch 2, fp16), of Flux (4096 + 512 tokens, bf16) and of LTX, random weights,
through the pack's own adapters; each is compiled in VARIANTS, replayed as a CUDA graph, and compared with fp32.
`before` has none of the changes, `present` is what the pack does. A block's result counts with the copy into the layout
that the next region reads. `whole_step_ms`: the microseconds of a block, times how often a step runs it, summed up.
`products`: products of one input with several weights, one after the other, as one strided product over the weights
where they lie, and with the weights copied beside each other (what that could gain at most); Flux's joined product of
two inputs, copied beside each other or one after the other.
`--cpu` checks the script with small sizes and measures nothing. It begins no variant after `--seconds`; a later run
with the same `--out` on such a GPU measures what it lacks.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from . import rig
from .parity import load_pack_for_device, relative
from .regions import microseconds
from .trial_blocks import BLOCKS, COUNTS
from .trial_products import products

PACK = "resolute_pack"
_COMPILE = f"{PACK}.compile_cache.backends.inductor.compile"


def _any_size(shape_env: Any, name: str, hint: int) -> Any:
    """A size that may be 0."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    return shape_env.create_unspecified_symint_and_symbol(hint, ConstantSource(f"dim_{name}"), DimDynamic.DYNAMIC)


def _without(*names: str) -> Callable[[], AbstractContextManager[Any]]:
    """Leave changes out: each is one function of the pack."""
    changes = {
        "rotary": (f"{_COMPILE}.rotary.by_operator", dict),
        "whole rows": (f"{_COMPILE}.lowering.held_at_once", contextlib.nullcontext),
        "by token": (f"{PACK}.nodes.adapters.blocks.common._by_token", lambda q: q),
        "maps": (f"{_COMPILE}.tracing._as_map", lambda result: result),
        "gelu": (f"{_COMPILE}.gelu.by_approximation", lambda elsewhere: elsewhere),
        "sizes": (f"{_COMPILE}.tracing._positive_size", _any_size),
    }

    @contextlib.contextmanager
    def left_out() -> Iterator[None]:
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(patch(*changes[name]))
            yield

    return left_out


def _settings(**values: Any) -> Callable[[], AbstractContextManager[Any]]:
    """The present state with other settings of inductor."""

    @contextlib.contextmanager
    def changed() -> Iterator[None]:
        from importlib import import_module

        lowering = import_module(f"{_COMPILE}.lowering")
        own = lowering._options
        names = {name.replace("__", "."): value for name, value in values.items()}
        with patch.object(lowering, "_options", lambda device: {**own(device), **names}):
            yield

    return changed


ALL = ("sizes", "whole rows", "rotary", "gelu", "by token", "maps")
VARIANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "before": _without(*ALL),
    "present": _without(),
    **{f"only {name}": _without(*(other for other in ALL if other != name)) for name in ALL},
    "combo kernels": _settings(combo_kernels=True),
    "pointwise tuned": _settings(triton__autotune_pointwise=True, max_autotune_pointwise=True),
    "coordinate descent": _settings(coordinate_descent_tuning=True),
}
# The variants that can change a block, by a part of its name; those that take long only for few blocks.
WANTED = {
    "BasicTransformerBlock": {"before", "present", "only sizes", "only whole rows", "combo kernels", "pointwise tuned"},
    "ResBlock": {"before", "present", "only sizes", "pointwise tuned"},
    "exit": {"before", "present", "only maps"},
    "StreamBlock": set(VARIANTS) - {"only maps", "coordinate descent"},
    "LTX": {"only rotary", "only gelu", "only by token"},
    "SingleStreamBlock": {"coordinate descent"},
    "BasicTransformerBlock 1280": {"coordinate descent"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--family", nargs="*", choices=list(BLOCKS), default=list(BLOCKS))
    parser.add_argument("--cpu", action="store_true", help="small sizes, to check this script")
    options = parser.parse_args()
    started = time.perf_counter()
    device = load_pack_for_device()
    if device == "cpu" and not options.cpu:
        parser.error("this needs CUDA; --cpu checks the script")
    import torch
    from torch._inductor.utils import fresh_cache

    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "torch": torch.__version__,
        "products": {},
        "blocks": {},
        "whole_step_ms": {},
    }
    result |= earlier(options.out, result)
    with torch.inference_mode(), fresh_cache():
        result["products"] = result["products"] or products(device)
        rig.save(options.out, result)
        cases = [case for model in options.family for case in BLOCKS[model](device)]
        for variant in options.variants:
            for name, site, inputs in cases:
                row = result["blocks"].setdefault(name, {})
                wanted = any(part in name and variant in variants for part, variants in WANTED.items())
                if not wanted or "microseconds" in row.get(variant, {}):
                    continue
                if time.perf_counter() - started > options.seconds:
                    print(f"{variant:20} {name:36} left out", flush=True)
                    continue
                row[variant] = attempt(variant, site, inputs)
                print(
                    f"{variant:20} {name:36}",
                    brief(row[variant]),
                    f"at {time.perf_counter() - started:.0f} s",
                    flush=True,
                )
                result["whole_step_ms"] = whole_step(result["blocks"])
                rig.save(options.out, result)
    for model, steps in result["whole_step_ms"].items():
        print(model, {variant: round(milliseconds, 2) for variant, milliseconds in steps.items()})


def earlier(out: Path | None, now: dict[str, Any]) -> dict[str, Any]:
    """The rows of an earlier run with this GPU and this torch."""
    if out is None or not out.is_file():
        return {}
    found: dict[str, Any] = json.loads(out.read_text("utf-8"))
    if any(found[name] != now[name] for name in ("gpu", "torch")):
        raise SystemExit(f"{out} is of {found['gpu']} with torch {found['torch']}: choose another file")
    return {name: found[name] for name in ("products", "blocks")}


def brief(row: dict[str, Any]) -> str:
    if "failed" in row:
        return str(row["failed"])
    return f"{row['microseconds']:8.1f} us, error {row['error']:.2e}, {len(row['kernels'])} kernels"


def whole_step(blocks: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By model and variant. A block without a variant counts with its time before, or at present for other settings."""
    sums: dict[str, dict[str, float]] = {}
    for name, row in blocks.items():
        model = sums.setdefault(name.split()[0], {})
        for variant in VARIANTS:
            instead = row.get("before" if variant.startswith("only") else "present", {})
            found = row.get(variant, instead).get("microseconds")
            if found is not None:
                model[variant] = model.get(variant, 0.0) + COUNTS[name] * found / 1000
    return sums


def attempt(variant: str, site: Any, inputs: list[Any]) -> dict[str, Any]:
    try:
        with VARIANTS[variant]():
            return measure(site, inputs)
    except Exception as error:  # noqa: BLE001 (that it fails is the result)
        return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}


def measure(site: Any, inputs: list[Any]) -> dict[str, Any]:
    import torch
    from resolute_pack.compile_cache.backends.inductor.compile import lowering, tracing
    from resolute_pack.compile_cache.regions.region_weights import weight_inputs, weight_slots
    from torch._inductor import config

    device = inputs[0].device
    weights = weight_inputs(weight_slots(site.module, site.without))
    started = time.perf_counter()
    # Tuning by coordinate descent needs tensors, where the pack launches kernels by address.
    with config.patch(fx_graph_cache=False), patch.object(lowering, "launch_by_address", lambda modules: {}):
        traced, compiled = compile_as_the_pack(site, inputs)
        used = [weights[index] for index in traced.used_weights]

        def call() -> Any:
            leaf = compiled.code([*used, *inputs])[0]
            return leaf.contiguous(memory_format=tracing.region_format(leaf, site.dims[0]))

        found = call()
        seconds = time.perf_counter() - started
        exact = copy.deepcopy(site.module).float()
        right = site.function(exact, *(each.float() if each.is_floating_point() else each for each in inputs))
        right = torch.utils._pytree.tree_leaves(right)[0]
        return {
            "microseconds": microseconds(call, device),
            "error": relative(found, right),
            "seconds_to_compile": seconds,
            "kernels": kernels(call) if device.type == "cuda" else {},
        }


def compile_as_the_pack(site: Any, inputs: list[Any]) -> tuple[Any, Any]:
    """The trace, and what inductor made of it. See `size_one_is_general` for the two tries."""
    from resolute_pack.compile_cache.backends.inductor.compile import lowering, tracing

    hints = tracing.general_hints(tracing.bind_dims(site.dims, [each.shape for each in inputs]), inputs[0].device)
    for is_last in (False, True):
        try:
            traced = tracing.trace(site.function, site.module, inputs, site.dims, hints, not is_last, site.without)
            return traced, lowering.compile_trace(traced)
        except Exception:
            if is_last:
                raise
    raise AssertionError("it returned or raised")


def kernels(call: Callable[[], Any]) -> dict[str, list[float]]:
    """Count and microseconds of each kernel of a replay, the longest first."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profiler.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            entry = found.setdefault(event.name[:120], [0, 0.0])
            entry[0] += 1
            entry[1] += event.device_time
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


if __name__ == "__main__":
    main()
