"""Decoders of videos and encoders beside stock ComfyUI, in one process, with random weights of their real width.

    COMFYUI_PATH=... python -m benchmarks.video --out benchmarks/results/NAME-video.json [--cells wan] [--seconds 240]

A cell is a VAE, what it does, and a size. Stock runs first, then Resolute: one run that compiles (`first_s`), then the
timed ones; `stock_s` and `resolute_s` are the fastest of REPEATS. `stock_peak_gib` and `resolute_peak_gib` are the most
that torch's allocator held in a timed run, weights included. `error` is the relative difference of the two results.
Cells that the file has already are left out, so a run goes on where another one ended; with --seconds no cell is begun
after that time. A cell that cannot run says why. Without CUDA all sizes are tiny, and nothing is measured.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .parity import load_pack_for_device

REPEATS = 2
_GIB = 1 << 30


@dataclass(frozen=True)
class Cell:
    """make: the first_stage_model. latent: (channels, frames, height, width) of a decode. size: width and height in
    pixels. frames: of the video. what: "decode" or "encode".
    """

    name: str
    make: Callable[[], Any]
    latent: tuple[int, ...]
    size: tuple[int, int]
    frames: int
    what: str = "decode"


def _wan() -> Any:
    from comfy.ldm.wan.vae import WanVAE

    return WanVAE(dim=96, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, temperal_downsample=[False, True, True])


def _wan22() -> Any:
    from comfy.ldm.wan.vae2_2 import WanVAE

    return WanVAE(dim=160, z_dim=48, dim_mult=[1, 2, 4, 4], num_res_blocks=2, temperal_downsample=[False, True, True])


def _ltx() -> Any:
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

    return VideoVAE(version=2)


def _hunyuan() -> Any:
    from comfy.ldm.models.autoencoder import AutoencoderKL

    return AutoencoderKL(ddconfig={**_KL, "z_channels": 16, "conv3d": True, "time_compress": 4}, embed_dim=16)


def _flux() -> Any:
    from comfy.ldm.models.autoencoder import AutoencodingEngine

    where, settings = "comfy.ldm.modules.diffusionmodules.model", {**_KL, "z_channels": 16}
    return AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": f"{where}.Encoder", "params": settings},
        decoder_config={"target": f"{where}.Decoder", "params": settings},
    )


def _h3() -> Any:
    from comfy.ldm.minimax.vae import MiniMaxH3VideoVAE

    return MiniMaxH3VideoVAE()


_KL: dict[str, Any] = {
    "double_z": True, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128, "ch_mult": [1, 2, 4, 4],
    "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip
CELLS = (
    Cell("wan", _wan, (16, 21, 60, 104), (832, 480), 81),
    Cell("ltx", _ltx, (128, 16, 16, 24), (768, 512), 121),
    Cell("hunyuan", _hunyuan, (16, 16, 90, 160), (1280, 720), 61),
    Cell("h3", _h3, (24, 22, 30, 54), (864, 480), 73),
    Cell("wan22", _wan22, (48, 16, 44, 80), (1280, 704), 61),
    Cell("flux", _flux, (16, 128, 128), (1024, 1024), 1, "encode"),
    Cell("qwen", _wan, (16, 1, 128, 128), (1024, 1024), 1, "encode"),
    Cell("qwen", _wan, (16, 1, 128, 128), (1024, 1024), 1),
)


def loaded_vae(cell: Cell) -> Any:
    """A comfy.sd.VAE that core finds out from random weights."""
    import comfy.sd
    import torch

    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in cell.make().state_dict().items()}
    torch.manual_seed(0)
    weights = {name: _random(name, shape) for name, shape in shapes.items()}
    return comfy.sd.VAE(sd=weights)


def _random(name: str, shape: Any) -> Any:
    """Weights that keep a signal's variance."""
    import torch

    is_matrix = len(shape) >= 2 and not name.endswith(("gamma", "bias"))
    if is_matrix:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return (torch.randn(shape, device=device) * math.prod(shape[1:]) ** -0.5).cpu()
    return torch.zeros(shape) if name.endswith(("bias", "mean-of-means")) else torch.ones(shape)


def measure(cell: Cell) -> dict[str, Any]:
    """The row of a cell."""
    import torch

    row: dict[str, Any] = {
        "model": cell.name,
        "what": cell.what,
        "size": f"{cell.size[0]}x{cell.size[1]}",
        "frames": cell.frames,
    }
    vae = loaded_vae(cell)
    row["dtype"] = str(vae.vae_dtype).removeprefix("torch.")
    given = _given(cell)
    getattr(vae, cell.what)(given)
    expected, row["stock_s"], row["stock_peak_gib"] = _timed(vae, cell.what, given)
    compiled = _compiled(vae, cell.what)
    before = _counters()
    started = time.perf_counter()
    getattr(compiled, cell.what)(given)
    row["first_s"] = round(time.perf_counter() - started, 2)
    middle = _counters()
    actual, row["resolute_s"], row["resolute_peak_gib"] = _timed(compiled, cell.what, given)
    after = _counters()
    row["error"] = float(f"{_relative(actual, expected):.2e}")
    row["compiles"] = middle["region_compiles"] - before["region_compiles"]
    row["later_compiles"] = after["region_compiles"] - middle["region_compiles"]
    row["region_calls"] = after["region_calls"] - middle["region_calls"]
    row["captures"] = after["captures"] - before["captures"]
    row["bypasses"] = {name: n for name, n in after["bypasses"].items() if n != before["bypasses"].get(name, 0)}
    row["faster"] = round(row["stock_s"] / row["resolute_s"], 2)
    del vae, compiled, expected, actual
    gc.collect()
    torch.cuda.empty_cache()
    return row


def _given(cell: Cell) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1)
    if cell.what == "encode":
        return torch.rand((1, cell.size[1], cell.size[0], 3), generator=generator)
    channels, *sizes = cell.latent
    if not torch.cuda.is_available():
        sizes = [min(size, 5) for size in sizes]
    return torch.randn((1, channels, *sizes), generator=generator)


def _timed(vae: Any, what: str, given: Any) -> tuple[Any, float, float]:
    """The result, the seconds of the fastest of REPEATS runs, and their peak of memory in GiB."""
    import torch

    result: list[Any] = []
    seconds = []
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(REPEATS):
        result.clear()
        started = time.perf_counter()
        result.append(getattr(vae, what)(given))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() / _GIB if torch.cuda.is_available() else 0.0
    return result.pop(), round(min(seconds), 4), round(peak, 3)


def _compiled(vae: Any, what: str) -> Any:
    import resolute_pack.nodes.adapters.compile.vae as compiling  # type: ignore[import-not-found]

    return compiling.compile_vae(vae, "inductor", None, (getattr(compiling, what.upper()),))


def _counters() -> dict[str, Any]:
    from resolute_pack.nodes.adapters.process import runtime  # type: ignore[import-not-found]

    found: dict[str, Any] = runtime.cache().stats.snapshot()
    return found


def _relative(actual: Any, expected: Any) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| cell | stock s | Resolute s | | stock GiB | Resolute GiB | first s | error |", "|" + "---|" * 8]
    for row in rows:
        name = f"{row['model']} {row['what']}, {row['size']} x {row['frames']}"
        if "failed" in row:
            lines.append(f"| {name} | {row['failed']} |")
            continue
        numbers = (row[key] for key in ("stock_s", "resolute_s", "faster"))
        peaks = (row[key] for key in ("stock_peak_gib", "resolute_peak_gib", "first_s", "error"))
        lines.append("| " + " | ".join(map(str, (name, *numbers, *peaks))) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cells", nargs="*", help="names of models; all by default")
    parser.add_argument("--channels-first", action="store_true", help="without channels-last for videos, to compare")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no cell after this time")
    options = parser.parse_args()
    load_pack_for_device()
    import torch

    if options.channels_first:
        import resolute_pack.compile_cache.backends.inductor.compile.tracing as tracing  # type: ignore[import-not-found]

        del tracing._MAP_FORMATS[5]
    done: list[dict[str, Any]] = []
    if options.out is not None and options.out.exists():
        done = json.loads(options.out.read_text("utf-8"))["rows"]
    known = {(row["model"], row["what"], row["size"], row["frames"]) for row in done if "failed" not in row}
    rows = [row for row in done if "failed" not in row]
    started = time.monotonic()
    with torch.inference_mode():
        for cell in CELLS:
            key = (cell.name, cell.what, f"{cell.size[0]}x{cell.size[1]}", cell.frames)
            if (options.cells and cell.name not in options.cells) or key in known:
                continue
            if time.monotonic() - started > options.seconds:
                print("left out for lack of time:", *key, flush=True)
                continue
            try:
                row = measure(cell)
            except Exception as error:  # noqa: BLE001 (the other cells are measured)
                row = dict(zip(("model", "what", "size", "frames"), key, strict=True))
                row["failed"] = f"{type(error).__name__}: {error}"[:300]
                traceback.print_exc()
            rows.append(row)
            print(json.dumps(row), flush=True)
            if options.out is not None:
                _save(options.out, rows)
    print(table(rows))


def _save(path: Path, rows: list[dict[str, Any]]) -> None:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    about = {"date": datetime.date.today().isoformat(), "device": device, "torch": torch.__version__}
    path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
