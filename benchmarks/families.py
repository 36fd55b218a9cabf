"""Transformers of real width with random weights: stock ComfyUI, its TorchCompileModel, and Resolute, in one server.

    python -m benchmarks.families --out benchmarks/results/NAME-families.json [--family flux z-image qwen-image wan]
                                  [--argument --disable-dynamic-vram ...] [--weights default fp8_e4m3fn_fast]

The models have fewer layers than the real ones, and their weights are made on the GPU, once. `ms` is the time of a
step: (20-step prompt - 1-step prompt) / 19. `first_s`: by how much the first prompt of a size is longer than the next.
`floor_ms`: the matrix products and the attention of one step at FLOOR_TFLOPS. `error`: Resolute's latents against
stock's. Needs CUDA and the environment of `scripts/test` (without a network, set RESOLUTE_PYTHON and COMFYUI_PATH).
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from scripts.support import command
from scripts.support.client import Client, execution_seconds
from scripts.support.server import ComfyServer

from .tour import ROOT, STEPS, STOCK, environment, without_paths

CORE, OURS = "TorchCompileModel", "inductor"
FLOOR_TFLOPS = 790  # what an H200 reaches in large products of bf16


class Family(NamedTuple):
    """network: below `comfy.ldm`. settings: of the network. tokens, width, pooled: of the text.

    latent: the node that makes the latent, and how many frames it has. sizes: width and height.
    """

    network: str
    settings: dict[str, Any]
    tokens: int
    width: int
    pooled: int
    latent: str
    frames: int
    sizes: list[tuple[int, int]]


IMAGES = [(1024, 1024), (720, 960), (1536, 1024)]
FAMILIES = {
    "flux": Family(
        "flux.model.Flux",
        {
            "image_model": "flux", "in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 4096,
            "hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24, "depth": 10, "depth_single_blocks": 20,
            "axes_dim": [16, 56, 56], "theta": 10000, "txt_ids_dims": [], "patch_size": 2, "qkv_bias": True,
            "guidance_embed": True,
        },
        512, 4096, 768, "EmptySD3LatentImage", 1, IMAGES,
    ),
    "z-image": Family(
        "lumina.model.NextDiT",
        {
            "patch_size": 2, "in_channels": 16, "dim": 3840, "n_layers": 15, "n_refiner_layers": 2, "n_heads": 30,
            "n_kv_heads": 30, "multiple_of": 256, "ffn_dim_multiplier": 8 / 3, "qk_norm": True, "cap_feat_dim": 2560,
            "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512], "rope_theta": 256.0, "z_image_modulation": True,
            "time_scale": 1000.0,
        },
        128, 2560, 0, "EmptySD3LatentImage", 1, IMAGES,
    ),
    "qwen-image": Family(
        "qwen_image.model.QwenImageTransformer2DModel", {"in_channels": 64, "num_layers": 12},
        128, 3584, 0, "EmptySD3LatentImage", 1, IMAGES,
    ),
    "wan": Family(
        "wan.model.WanModel",
        {
            "model_type": "t2v", "in_dim": 16, "dim": 1536, "ffn_dim": 8960, "freq_dim": 256, "text_dim": 4096,
            "out_dim": 16, "num_heads": 12, "num_layers": 30, "cross_attn_norm": True,
        },
        512, 4096, 0, "EmptyHunyuanLatentVideo", 33, [(832, 480), (480, 832), (624, 624)],
    ),
}  # fmt: skip


def file_of(name: str) -> str:
    return f"resolute-random-{name}.safetensors"


def prompt(
    name: str, contender: str, size: tuple[int, int], weights: str, steps: int = STEPS, seed: int = 1
) -> dict[str, Any]:
    """Sample with core's nodes and save the latents; the compile node is the only difference between contenders."""
    family = FAMILIES[name]
    video = {"length": family.frames} if family.frames > 1 else {}
    model = ["load", 0]
    text = {"tokens": family.tokens, "width": family.width, "pooled_width": family.pooled, "batch": 1}
    nodes: dict[str, Any] = {
        "load": _node("UNETLoader", unet_name=file_of(name), weight_dtype=weights),
        "positive": _node("ResoluteTestConditioning", seed=1, **text),
        "negative": _node("ResoluteTestConditioning", seed=2, **text),
        "latent": _node(family.latent, width=size[0], height=size[1], batch_size=1, **video),
    }
    if contender != STOCK:
        kind = CORE if contender == CORE else "ResoluteCompileModel"
        nodes["compile"] = _node(kind, model=model, backend="inductor")
        model = ["compile", 0]
    nodes["sample"] = _node(
        "KSampler", model=model, seed=seed, steps=steps, cfg=1.0, sampler_name="euler", scheduler="simple",
        positive=["positive", 0], negative=["negative", 0], latent_image=["latent", 0], denoise=1.0,
    )  # fmt: skip
    nodes["latents"] = _node("ResoluteTestSaveLatent", samples=["sample", 0], filename_prefix="families")
    return nodes


def _node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def measure(client: Client, name: str, contender: str, size: tuple[int, int], weights: str) -> dict[str, Any]:
    """Three prompts of 20 steps, two of one step, and the latents of the first. An error of a prompt is a result."""
    before = client.get("/resolute/cache")["counters"]
    seconds, latents = [], b""
    try:
        for run in range(3):
            history = client.run(prompt(name, contender, size, weights, seed=1 + run))
            seconds.append(execution_seconds(history))
            latents = latents or b"".join(client.images(history, "latents")[:1])
        short = [execution_seconds(client.run(prompt(name, contender, size, weights, 1, 9 + run))) for run in range(2)]
    except Exception as error:  # noqa: BLE001 (core's node fails with some models, and the others are still measured)
        return {"failed": str(error).splitlines()[0][:300]}
    after = client.get("/resolute/cache")["counters"]
    steady = statistics.median(seconds[1:])
    return {
        "seconds": seconds,
        "one_step_seconds": short,
        "first_s": seconds[0] - steady,
        "ms": 1000 * (steady - short[-1]) / (STEPS - 1),
        "counters": {key: after[key] - before[key] for key in after if key != "bypasses"},
        "bypasses": {key: n - before["bypasses"].get(key, 0) for key, n in after["bypasses"].items()},
        "latents": latents,
    }


def visit(client: Client, name: str, size: tuple[int, int], weights: str, floor_ms: float | None) -> dict[str, Any]:
    """One row: the three contenders at one size."""
    results = {contender: measure(client, name, contender, size, weights) for contender in (STOCK, CORE, OURS)}
    latents = {contender: result.pop("latents", None) for contender, result in results.items()}
    frames = FAMILIES[name].frames
    return {
        "family": name,
        "size": "x".join(map(str, size)) + (f"x{frames}" if frames > 1 else ""),
        "weights": weights,
        "stock_ms": results[STOCK].get("ms"),
        "core_ms": results[CORE].get("ms"),
        "resolute_ms": results[OURS].get("ms"),
        "floor_ms": floor_ms,
        "error": _error(latents[OURS], latents[STOCK]),
        "details": results,
    }


def _error(ours: bytes | None, stock: bytes | None) -> float | None:
    import numpy

    if not ours or not stock:
        return None
    a, b = (numpy.load(io.BytesIO(file)).astype("float64") for file in (ours, stock))
    return float(numpy.linalg.norm(a - b) / numpy.linalg.norm(b))


# --- in a process with torch and ComfyUI -------------------------------------------------------------------------


def make(name: str, out: Path) -> None:
    """Write a model with random weights that keep a signal's size, unless it is there, and its work beside it."""
    import safetensors.torch
    import torch

    model = _build(name, "cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    for key, weight in model.state_dict().items():
        if weight.ndim > 1:
            weight.normal_(generator=generator).mul_(0.5 * weight[0].numel() ** -0.5)
        else:
            weight.fill_(1.0 if key.endswith(("weight", "scale")) else 0.0)
    work = {f"{width}x{height}": _tera_operations(model, name, width, height) for width, height in FAMILIES[name].sizes}
    safetensors.torch.save_file({key: weight.cpu() for key, weight in model.state_dict().items()}, str(out))
    out.with_suffix(".json").write_text(json.dumps(work))


def _build(name: str, device: str) -> Any:
    import torch

    operations = importlib.import_module("comfy.ops").disable_weight_init
    module, _, kind = FAMILIES[name].network.rpartition(".")
    network = getattr(importlib.import_module(f"comfy.ldm.{module}"), kind)
    model = network(**FAMILIES[name].settings, dtype=torch.bfloat16, device=device, operations=operations)
    return model.to(torch.bfloat16).eval().requires_grad_(False)


def _tera_operations(model: Any, name: str, width: int, height: int) -> float:
    """Of the matrix products and the attention of one step, in 10^12 floating-point operations."""
    import inspect

    import torch
    from torch.utils.flop_counter import FlopCounterMode

    family = FAMILIES[name]
    like = {"dtype": torch.bfloat16, "device": "cuda"}
    shape = (height // 8, width // 8)
    frames = ((family.frames - 1) // 4 + 1,) if family.frames > 1 or "qwen" in name else ()
    takes = inspect.signature(type(model).forward).parameters
    given: dict[str, Any] = {
        "x": torch.zeros((1, 16, *frames, *shape), **like),
        next(each for each in ("timestep", "timesteps", "t") if each in takes): torch.full((1,), 0.5, device="cuda"),
        "context": torch.zeros((1, family.tokens, family.width), **like),
        "num_tokens": family.tokens,
        "y": torch.zeros((1, family.pooled), **like) if family.pooled else None,
        "guidance": torch.full((1,), 3.5, **like),
    }
    with torch.inference_mode(), FlopCounterMode(display=False) as counted:
        model(**{key: value for key, value in given.items() if key in takes and value is not None})
    return counted.get_total_flops() / 1e12


# --- the command ---------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="*", choices=sorted(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--weights", nargs="*", default=["default"], help="as UNETLoader names them")
    parser.add_argument("--argument", action="append", default=[], help="an extra argument for ComfyUI")
    parser.add_argument("--models", type=Path, help="a folder that keeps the models; several GB each")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--make", nargs=3, metavar=("FAMILY", "FILE", "COMFYUI"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        name, file, comfyui = options.make
        sys.path.insert(0, comfyui)
        sys.argv = sys.argv[:1]  # ComfyUI reads the command line
        make(name, Path(file))
        return 0
    setup = command.prepare()
    base = options.models or Path(tempfile.mkdtemp(prefix="resolute-families-"))
    folder = base / "diffusion_models"
    folder.mkdir(parents=True, exist_ok=True)
    for name in options.family:
        file = folder / file_of(name)
        if not file.is_file():
            child = [str(setup.python), "-m", "benchmarks.families", "--make", name, str(file), str(setup.comfyui)]
            subprocess.run(child, cwd=ROOT, check=True)
    return _tour(setup, base, options)


def _tour(setup: command.Setup, base: Path, options: argparse.Namespace) -> int:
    packs = {"resolute": ROOT, "resolute-test-pack": ROOT / "tests" / "pack"}
    where = Path(tempfile.mkdtemp(prefix="resolute-families-server-"))
    server = ComfyServer(
        setup.python, setup.comfyui, where, packs=packs, models=base, cpu=False, arguments=options.argument
    )
    rows: list[dict[str, Any]] = []
    with server:
        about = {**environment(server), "arguments": without_paths(options.argument), "floor_tflops": FLOOR_TFLOPS}
        try:
            for name in options.family:
                work = json.loads((base / "diffusion_models" / file_of(name)).with_suffix(".json").read_text())
                for weights in options.weights:
                    for size in FAMILIES[name].sizes:
                        floor_ms = 1000 * work["x".join(map(str, size))] / FLOOR_TFLOPS
                        rows.append(visit(server.client, name, size, weights, floor_ms))
                        print(_line(rows[-1]), flush=True)
                        if options.out:  # after every size, so that an interrupted run has results
                            options.out.write_text(json.dumps({**about, "steps": STEPS, "rows": rows}, indent=1) + "\n")
        finally:
            (where / "server.log").write_text(server.log())
            print(f"server log: {where / 'server.log'}")
    return 0


def _line(row: dict[str, Any]) -> str:
    times = [row["stock_ms"], row["core_ms"], row["resolute_ms"], row["floor_ms"]]
    shown = "".join(f"{'failed' if time is None else f'{time:.1f}':>9}" for time in times)
    first = row["details"][OURS].get("first_s")
    return (
        f"{row['family']:<12}{row['size']:<14}{row['weights']:<18}{shown}  error {row['error']}  first {first}  "
        f"{row['details'][OURS].get('bypasses') or ''}"
    )


if __name__ == "__main__":
    sys.exit(main())
