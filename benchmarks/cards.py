"""Compile the regions of the bundled models for GPUs that are not installed, and list their kernels' resources.

    python -m benchmarks.cards --out FILE [--card sm_90] [--also sm_75] [--also gfx1100] [--region REGEX]

Needs no GPU: a description stands in for `--card`, as in a worker process, and Triton compiles each of its kernels for
`--also` too. Nothing is launched. A row of the file is one Triton compile: its processor seconds, the registers and the
bytes of stack of each thread, and the shared memory of a block; or its error. `faults` lists kernels that no card
should have. A convolution's kernel depends on the number of multiprocessors, so on another card inductor may generate
a different kernel than for `--card`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from compile_cache.backends.inductor.compiler import described_gpu
from scripts.places import ROOT

from .card_regions import regions
from .rig import commit_of

Row = dict[str, Any]


class Card(NamedTuple):
    """count: multiprocessors. threads: per multiprocessor. shared: bytes of shared memory that a block may use."""

    name: str
    count: int
    threads: int
    shared: int


CARDS = {
    "sm_75": Card("NVIDIA GeForce RTX 2080 Ti", 68, 1024, 65536),
    "sm_80": Card("NVIDIA A100-SXM4-80GB", 108, 2048, 166912),
    "sm_86": Card("NVIDIA GeForce RTX 3090", 82, 1536, 101376),
    "sm_89": Card("NVIDIA GeForce RTX 4090", 128, 1536, 101376),
    "sm_90": Card("NVIDIA H100 80GB HBM3", 132, 2048, 232448),
    "sm_100": Card("NVIDIA B200", 148, 2048, 232448),
    "sm_120": Card("NVIDIA GeForce RTX 5090", 170, 1536, 101376),
    "gfx1100": Card("AMD Radeon RX 7900 XTX", 48, 2048, 65536),
    "gfx1201": Card("AMD Radeon RX 9070 XT", 32, 2048, 65536),
}


def description(card: str, index: int = 0) -> described_gpu.Description:
    """Describe a card as torch does."""
    name, count, threads, shared = CARDS[card]
    kind, number = card.split("_") if "_" in card else (card, "110")
    return {
        "name": name, "major": int(number[:-1]), "minor": int(number[-1]), "multi_processor_count": count,
        "max_threads_per_multi_processor": threads, "max_threads_per_block": 1024, "regs_per_multiprocessor": 65536,
        "warp_size": 32, "total_memory": 24 << 30, "shared_memory_per_block_optin": shared,
        "gcnArchName": "" if kind == "sm" else card, "index": index,
    }  # fmt: skip


def resources(kernel: Any) -> dict[str, int]:
    """Registers per thread, bytes of stack per thread (spilled registers), bytes of shared memory per block."""
    shared = kernel.shared if hasattr(kernel, "shared") else kernel.metadata.shared
    registers, stack = described_gpu.registers_and_stack(kernel)
    return {"registers": registers, "stack": stack, "shared": shared}


def faults(rows: Iterable[Row]) -> dict[tuple[str, str], str]:
    """By region and card: the fault of one of its kernels. Each kernel needs one configuration that the card can run
    without register spills: inductor benchmarks all configurations that it compiled, and picks the fastest.
    """
    found: dict[tuple[str, str], str] = {}
    kernels: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        kernels.setdefault((row["region"], row["target"], row["kernel"]), []).append(row)
    for (region, target, kernel), tried in kernels.items():
        works = [row for row in tried if "error" not in row]
        fits = [row for row in works if row["shared"] <= CARDS[target].shared]
        if not works:
            found[region, target] = f"{kernel}: {tried[0]['error']}"
        elif not fits:
            found[region, target] = f"{kernel} takes {works[0]['shared']} bytes of shared memory"
        elif all(row["stack"] for row in fits):
            found[region, target] = f"{kernel} takes {min(row['stack'] for row in fits)} bytes of stack"
    return found


# --- their kernels ---------------------------------------------------------------------------------------------


def _choose_attention(q: Any, k: Any, v: Any, attn_mask: Any = None, scale: Any = None, **more: Any) -> Any:
    """Replaces torch's choice, which queries the driver, by the efficient kernel, even for the VAE's wide heads."""
    import torch

    if q.is_cpu:
        return torch._C._nn.scaled_dot_product_attention(q, k, v, attn_mask, scale=scale)
    bias = None if attn_mask is None else attn_mask.expand(*q.shape[:3], k.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, False, scale=scale)[0]


def compile_for(card: str, also: Iterable[str], wanted: str) -> Iterator[tuple[Row, list[Row]]]:
    """For each region: its row, with the total processor seconds and the error if no attempt succeeded, and its
    kernels' rows. also: other cards, for which only kernels that no earlier region had are compiled.
    """
    import torch
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    described_gpu.install_fake_gpu(description(card))
    torch.nn.functional.scaled_dot_product_attention = _choose_attention
    found: list[Row] = []
    known: set[str] = set()
    original, now = CachingAutotuner._precompile_config, SimpleNamespace(region="")

    def compiled(kernel: Any, config: Any) -> Any:
        own, name, result = kernel.device_props, str(kernel.inductor_meta.get("kernel_name")), None
        text = f"{kernel.fn.src.replace(name, '')} {config} {kernel.triton_meta['signature']}"
        for target in (card, *(() if text in known else also)):
            about = description(target)
            is_amd = target.startswith("gfx")
            kind = {
                "type": "hip" if is_amd else "cuda",
                "cc": target if is_amd else 10 * about["major"] + about["minor"],
            }
            kernel.device_props = own._replace(**kind, major=about["major"])
            row = {"region": now.region, "target": target, "kernel": name}
            found.append(row)
            before = sum(os.times()[:4])
            try:
                made = original(kernel, config)
                row |= resources(made.kernel)
                row |= {"config": str(config)} if row["stack"] else {}
                result = result or made
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
                if target == card:
                    raise
            finally:
                row["processor_seconds"] = round(sum(os.times()[:4]) - before, 3)
                kernel.device_props = own
        known.add(text)
        return result

    CachingAutotuner._precompile_config = compiled
    try:
        for now.region, site, inputs in list(regions(wanted)):
            before, first = sum(os.times()[:4]), len(found)
            error = _compile(site, inputs)
            row = {"region": now.region, "error": error} if error else {"region": now.region}
            yield {**row, "processor_seconds": round(sum(os.times()[:4]) - before, 2)}, found[first:]
    finally:
        CachingAutotuner._precompile_config = original


def _compile(site: Any, inputs: list[Any]) -> str:
    """Compile a region as the pack does. Returns the error of the last attempt, or an empty string."""
    from resolute_pack.compile_cache.backends.inductor.lower import (  # type: ignore[import-not-found]
        lowering,
        tracing,
    )

    sizes = tracing.bind_dims(site.dims, [tensor.shape for tensor in inputs])
    hints, failed = tracing.general_hints(sizes, inputs[0].device), ""
    for oblivious in (True, False):  # as `regions.table` does
        try:
            given = (site.function, site.module, inputs, site.dims, hints, oblivious, site.without, site.attends)
            lowering.compile_trace(tracing.trace(*given))
            return ""
        except Exception as error:  # noqa: BLE001 (it is the result)
            failed = f"{type(error).__name__}: {str(error)[:300]}"
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--card", choices=[card for card in CARDS if card.startswith("sm_")], default="sm_90")
    parser.add_argument("--also", action="append", choices=list(CARDS), default=[], metavar="CARD")
    parser.add_argument("--region", default="", metavar="REGEX", help="of their names, see the file")
    options = parser.parse_args()
    rows, kernels = list[Row](), list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        for row, of_region in compile_for(options.card, options.also, options.region):
            rows.append(row)
            kernels += of_region
            print(row, len(of_region), flush=True)
    found = {f"{region}, {card}": fault for (region, card), fault in faults(kernels).items()}
    about = {**commit_of(ROOT, None), "date": str(datetime.date.today()), "card": options.card, "also": options.also}
    options.out.write_text(json.dumps({**about, "regions": rows, "kernels": kernels, "faults": found}))
    print(*[f"{place}: {fault}" for place, fault in found.items()], sep="\n")
    return 0


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # even on a machine with a GPU
    sys.exit(main())
