"""Decoders and encoders beside stock ComfyUI, in one process, with random weights of their real width.

    COMFYUI_PATH=... python -m benchmarks.video --out benchmarks/results/NAME-video.json [--seconds 240]
                                                [--cells hunyuan h3 flux:encode] [--free 8 12]

A cell is a VAE, what it does, and a size. Resolute has one run that compiles (`first_s`), then as many as it takes
until it knows which way is faster, then the timed ones; stock's follow, when the captures are freed. `stock_s` and
`resolute_s` are the fastest of the cell's repeats. `compiled_s` and `original_s` are what it found, `left_alone` what
it chose; a decoder of pictures (`sdxl`) always runs compiled, and is captured. `stock_peak_gib` and
`resolute_peak_gib` are the most that torch's allocator held in a timed run, weights included, `compiled_peak_gib` in a
compiled one. `error` is the relative difference of a compiled result. With --free other memory is held, so that so many
GiB are free, and one run is timed, since a decode in tiles takes long. ComfyUI is without DynamicVRAM here: with too
little memory it leaves weights on the CPU. A later run with the same `--out` measures the cells that it lacks. A cell
that cannot run says why. Without CUDA all widths and sizes are tiny, and nothing is measured.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import importlib
import json
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .card_memory import GIB, small_card
from .cells import NO_LIMIT, Cells, Row, parts
from .parity import load_pack_for_device
from .video_models import loaded_vae

_MOST_CALLS = 8  # until it is known which way is faster


@dataclass(frozen=True)
class Cell:
    """name: of `VAES`. latent: (channels, frames, height, width) of a decode. size: width and height in pixels.
    frames: of the video. what: "decode" or "encode". repeats: timed runs.
    """

    name: str
    latent: tuple[int, ...]
    size: tuple[int, int]
    frames: int
    what: str = "decode"
    repeats: int = 2


CELLS = (
    Cell("sdxl", (4, 128, 128), (1024, 1024), 1, repeats=10),
    Cell("hunyuan", (16, 16, 90, 160), (1280, 720), 61),
    Cell("hunyuan15", (32, 16, 45, 80), (1280, 720), 61),
    Cell("h3", (24, 22, 30, 54), (864, 480), 73),
    Cell("wan22", (48, 16, 44, 80), (1280, 704), 61),
    Cell("wan", (16, 21, 60, 104), (832, 480), 81),
    Cell("ltx", (128, 13, 16, 24), (768, 512), 97),
    Cell("flux", (), (1024, 1024), 1, "encode"),
    Cell("qwen", (), (1024, 1024), 1, "encode"),
    Cell("qwen", (16, 1, 128, 128), (1024, 1024), 1),
    Cell("wan", (), (832, 480), 33, "encode"),
    Cell("wan22", (), (1280, 704), 1, "encode"),
    Cell("cosmos", (16, 8, 88, 160), (1280, 704), 57),
    Cell("mochi", (12, 13, 60, 106), (848, 480), 73),
)


def measure(cell: Cell, free: float | None = None, is_small: bool = False) -> Iterator[Row]:
    """The row of a cell, first without stock's times. free: GiB that are free. is_small: tiny, on the CPU."""
    vae, given = loaded_vae(cell.name, is_small), _given(cell, is_small)
    repeats = cell.repeats if free is None else 1
    row = about(cell, free) | {"dtype": str(vae.vae_dtype).removeprefix("torch.")}

    def add(contender: str) -> None:
        if contender == "resolute":
            row.update(_of_resolute(vae, cell, given, repeats))
            return
        _ours("process.runtime").cache().trim()
        _, row["stock_s"], row["stock_peak_gib"] = _timed(vae, cell.what, given, repeats)
        row["faster"] = round(row["stock_s"] / row["resolute_s"], 2)

    return parts(row, ("resolute", "stock"), add)


def _of_resolute(vae: Any, cell: Cell, given: Any, repeats: int) -> Row:
    import torch

    row: Row = {}
    torch.manual_seed(0)  # LTX adds random numbers
    expected = getattr(vae, cell.what)(given)
    compiled = _compiled(vae, cell.what)
    before = _counters()
    torch.manual_seed(0)
    started = time.perf_counter()
    actual = getattr(compiled, cell.what)(given)
    row["first_s"] = round(time.perf_counter() - started, 2)
    row["error"] = float(f"{_relative(actual, expected):.2e}")
    del actual, expected
    middle = _counters()
    _, _, row["compiled_peak_gib"] = _timed(compiled, cell.what, given, 1)
    row |= _compared(compiled, cell.what, given)
    _, row["resolute_s"], row["resolute_peak_gib"] = _timed(compiled, cell.what, given, repeats)
    after = _counters()
    row["compiles"] = middle["region_compiles"] - before["region_compiles"]
    row["later_compiles"] = after["region_compiles"] - middle["region_compiles"]
    row["region_calls"] = after["region_calls"] - before["region_calls"]
    row |= {name: after[name] - before[name] for name in ("captures", "replays")}
    row["bypasses"] = {name: n for name, n in after["bypasses"].items() if n != before["bypasses"].get(name, 0)}
    return row


def about(cell: Cell, free: float | None) -> dict[str, Any]:
    """The entries of a row that name its cell."""
    size = f"{cell.size[0]}x{cell.size[1]}"
    return {"model": cell.name, "what": cell.what, "size": size, "frames": cell.frames, "free_gib": free}


def _given(cell: Cell, is_small: bool) -> Any:
    """A latent, or pixels."""
    import torch

    generator = torch.Generator().manual_seed(1)
    if cell.what == "encode":
        width, height, frames = (64, 96, min(cell.frames, 9)) if is_small else (*cell.size, cell.frames)
        return torch.rand((frames, height, width, 3), generator=generator)
    channels, *sizes = cell.latent
    sizes = [min(size, 5) for size in sizes] if is_small else sizes
    return torch.randn((1, channels, *sizes), generator=generator)


def _timed(vae: Any, what: str, given: Any, repeats: int) -> tuple[Any, float, float]:
    """The result, the seconds of the fastest run, and the peak of memory in GiB."""
    import torch

    result: list[Any] = []
    seconds = []
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        result.clear()
        started = time.perf_counter()
        result.append(getattr(vae, what)(given))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else 0.0
    return result.pop(), round(min(seconds), 4), round(peak, 3)


def _compared(vae: Any, what: str, given: Any) -> dict[str, Any]:
    """Call until Resolute knows which way is faster: what it found. Empty where calls are not compared."""
    runtime = _ours("process.runtime")
    (patch,) = vae.patcher.object_patches.values()
    mine = {"model": runtime.fingerprint_of(patch.module)[:12], "role": f"vae_{what}"}
    row: dict[str, Any] = {}
    for calls in range(_MOST_CALLS):
        found = [each for each in runtime.cache().whole_calls.report() if mine.items() <= each.items()]
        for each in found:  # one, but for a decoder that goes by tiles
            row = {"compiled_s": round(each["seconds"], 4), "original_s": round(each["original_seconds"], 4)}
            row |= {"left_alone": each["is_left_alone"], "calls_to_compare": calls}
        if calls and all(each["is_settled"] for each in found):  # a run is counted when the next one begins
            break
        getattr(vae, what)(given)
    return row


def _compiled(vae: Any, what: str) -> Any:
    compiling = _ours("compile.vae")
    return compiling.compile_vae(vae, "inductor", None, (getattr(compiling, what.upper()),))


def _counters() -> dict[str, Any]:
    found: dict[str, Any] = _ours("process.runtime").cache().stats.snapshot()
    return found


def _ours(name: str) -> Any:
    return importlib.import_module(f"resolute_pack.nodes.adapters.{name}")


def _relative(actual: Any, expected: Any) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| cell | stock s | Resolute s | | stock GiB | Resolute GiB | first s | error |", "|" + "---|" * 8]
    for row in rows:
        row = dict.fromkeys(("stock_s", "faster", "stock_peak_gib"), "-") | row
        name = f"{row['model']} {row['what']}, {row['size']} x {row['frames']}"
        name += f", {row['free_gib']:g} GiB free" if row.get("free_gib") else ""
        if "failed" in row:
            lines.append(f"| {name} | {row['failed']} |")
            continue
        numbers = (row[key] for key in ("stock_s", "resolute_s", "faster"))
        peaks = (row[key] for key in ("stock_peak_gib", "resolute_peak_gib", "first_s", "error"))
        lines.append("| " + " | ".join(map(str, (name, *numbers, *peaks))) + " |")
    return "\n".join(lines)


def attempt(cell: Cell, free: float | None, is_small: bool) -> Iterator[Row]:
    """As `measure`; a row that says why, if the cell fails: the others are still measured."""
    import torch

    row = about(cell, free)
    begun = time.monotonic()
    try:
        with small_card(free):
            for row in measure(cell, free, is_small):
                yield row
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        here = [frame.line for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__]
        row = {**row, "failed": f"{here[-1]}: {type(error).__name__}: {error}"[:300]}  # the line says which contender's
    gc.collect()
    torch.cuda.empty_cache()  # else a ballast could not take it
    yield {**row, "cell_s": round(time.monotonic() - begun, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cells", nargs="*", help="names of models, or as flux:encode; all by default")
    parser.add_argument("--free", nargs="*", type=float, default=[None], help="GiB that are free; all by default")
    parser.add_argument("--seconds", type=float, default=NO_LIMIT, help="begin nothing that would end later")
    options = parser.parse_args()
    os.environ["RESOLUTE_COMPILE"] = "before"  # else the first calls run as stock's, while workers compile
    load_pack_for_device()
    import torch

    cells = Cells(options, lambda row: tuple(row[name] for name in ("model", "what", "size", "frames", "free_gib")))
    has_gpu = torch.cuda.is_available()
    cells.about |= {"date": datetime.date.today().isoformat(), "torch": torch.__version__}
    cells.about["gpu"] = torch.cuda.get_device_name() if has_gpu else "none"
    names = options.cells
    chosen = [each for each in CELLS if not names or {each.name, f"{each.name}:{each.what}"} & set(names)]
    with torch.inference_mode():
        for cell, free in ((cell, free) for free in options.free for cell in chosen):
            if cells.lacks(tuple(about(cell, free).values())):
                name = " ".join(map(str, about(cell, free).values()))
                row = cells.measure(name, functools.partial(attempt, cell, free, not has_gpu))
                print(json.dumps(row), flush=True)
    print(table(cells.rows))


if __name__ == "__main__":
    main()
