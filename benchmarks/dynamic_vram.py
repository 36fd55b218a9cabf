"""Changes LoRAs, sizes and models, unloads and loads: stock ComfyUI and Resolute in one server, with DynamicVRAM.

    python -m benchmarks.dynamic_vram --out benchmarks/results/NAME.json [--free 8] [--backends inductor cudagraph]
                                      [--steps 20] [--only NAME ...] [--restart] [--wan rand_wan.safetensors]

Each situation runs twice with stock ComfyUI and twice with each backend, with one seed. The table has the seconds of
both prompts, captures, compiles, and the error of the latents against stock (0: equal to the last bit). Peaks are of
the whole device, and of the server's host memory. `--free N` first holds memory, so that N GiB of the card are free: a
smaller card. `--restart` also measures the first prompt of a new server for each. `--wan` adds Wan 2.1 with the weights
of that file, 832x480, 17 frames. Needs CUDA and the environment of `scripts/test` (without a network, set
RESOLUTE_PYTHON and COMFYUI_PATH).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file

from scripts.models import generated
from scripts.server.client import Client, execution_seconds
from scripts.server.process import ComfyServer
from scripts.setup import command

from . import rig
from .card_memory import Memory, small_card
from .rig import STOCK, environment, node, prompt, without_paths

RANK = 8


@dataclass(frozen=True)
class Situation:
    """One prompt of the sequence. unload: ask ComfyUI to unload all models first."""

    name: str
    width: int = 1024
    height: int = 1024
    lora: str = ""
    strength: float = 1.0
    kind: str = "sdxl"
    unload: bool = False


SEQUENCE = (
    Situation("1024x1024"),
    Situation("LoRA a", lora="a"),
    Situation("LoRA a, weaker", lora="a", strength=0.4),
    Situation("LoRA b", lora="b"),
    Situation("no LoRA"),
    Situation("720x960", 720, 960),
    Situation("after unload", unload=True),
    Situation("SD1.5 512x512", 512, 512, kind="sd15"),
    Situation("back at 1024x1024"),
    Situation("LoRA a, 720x960", 720, 960, lora="a"),
    Situation("Wan 832x480x17", 832, 480, kind="wan"),
)


def write_lora(checkpoint: Path, out: Path, seed: int) -> None:
    """A random LoRA of RANK for every attention projection and every residual block of a checkpoint's UNet."""
    from safetensors import safe_open

    noise, tensors = torch.Generator().manual_seed(seed), {}
    prefix = "model.diffusion_model."
    with safe_open(checkpoint, "pt") as file:
        for key in file.keys():  # noqa: SIM118 (no mapping)
            if not key.startswith(prefix) or not key.endswith((".to_q.weight", ".to_out.0.weight", ".2.weight")):
                continue
            shape = file.get_slice(key).get_shape()
            name, fan_in = key.removeprefix(prefix).removesuffix(".weight"), torch.Size(shape[1:]).numel()
            if len(shape) < 2:
                continue
            down = torch.randn((RANK, *shape[1:]), generator=noise) / fan_in**0.5
            up = torch.randn((shape[0], RANK, *[1] * (len(shape) - 2)), generator=noise) * 0.05
            tensors[f"diffusion_model.{name}.lora_down.weight"] = down.half()
            tensors[f"diffusion_model.{name}.lora_up.weight"] = up.half()
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out)


def write_loras(checkpoint: Path) -> None:
    """The LoRAs a and b, where they are missing."""
    for seed, name in enumerate("ab"):
        file = generated.folder() / "loras" / f"bench-{name}.safetensors"
        if not file.is_file():
            write_lora(checkpoint, file, seed)


def wan_prompt(file: str, backend: str, steps: int, seed: int) -> dict[str, Any]:
    """Text to video with random conditioning, without a text encoder and a VAE."""
    nodes: dict[str, Any] = {
        "load": node("UNETLoader", unet_name=file, weight_dtype="default"),
        "latent": node("EmptyHunyuanLatentVideo", width=832, height=480, length=17, batch_size=1),
    }
    for place, name in enumerate(("positive", "negative")):
        nodes[name] = node("ResoluteTestConditioning", seed=place, tokens=512, width=4096, pooled_width=0, batch=1)
    model = ["load", 0]
    if backend != STOCK:
        nodes["compile"] = node("ResoluteCompileModel", model=model, backend=backend)
        model = ["compile", 0]
    return rig.sampled(nodes, model, seed, steps, 6.0, "simple")


def run(
    client: Client, situation: Situation, backend: str, steps: int, seed: int, files: dict[str, str]
) -> dict[str, Any]:
    size = (situation.width, situation.height, 1, "a lighthouse")
    if situation.kind == "wan":
        nodes = wan_prompt(files["wan"], backend, steps, seed)
    else:
        nodes = prompt(files[situation.kind], backend, size, steps=steps, seed=seed)
    if situation.lora:
        name = f"bench-{situation.lora}.safetensors"
        lora = node("LoraLoaderModelOnly", model=["load", 0], lora_name=name, strength_model=situation.strength)
        nodes["lora"] = lora
        user = "compile" if "compile" in nodes else "sample"
        nodes[user]["inputs"]["model"] = ["lora", 0]
    before = rig.counters(client)
    started = time.perf_counter()
    history = client.run(nodes)
    risen = rig.rise(before, rig.counters(client))
    latents = rig.latents(client, history)
    return {
        "seconds": execution_seconds(history),
        "wall": time.perf_counter() - started,
        "latents": latents,
        "excerpt": [float(value) for value in latents[::4097][:16]],
        **{name: risen[name] for name in ("captures", "replays", "region_compiles", "region_calls")},
        "stall": risen["stall_seconds"],
        "bypasses": risen["bypasses"],
    }


def line(name: str, backend: str, row: dict[str, Any]) -> str:
    errors = " ".join(f"{error:.1e}" for error in row["errors"])
    runs = "  ".join(f"{each['seconds']:6.2f}s c{each['captures']} r{each['replays']:<3}" for each in row["runs"])
    return (
        f"{name:<20}{backend:<10}{runs}  errors {errors}  {row['device_gib']:5.1f}/{row['host_gib']:5.1f} GiB "
        f"compiles {sum(each['region_compiles'] for each in row['runs'])} {[each['bypasses'] for each in row['runs']]}"
    )


def measure(
    client: Client, options: argparse.Namespace, files: dict[str, str], memory: Memory
) -> Iterator[dict[str, Any]]:
    for situation in SEQUENCE:
        if (options.only and situation.name not in options.only) or situation.kind not in files:
            continue
        references: list[Any] = []
        for backend in [STOCK, *options.backends]:
            if situation.unload:
                client.post("/free", {"unload_models": True})
                time.sleep(2)
            memory.take()
            runs = [run(client, situation, backend, options.steps, seed, files) for seed in (5, 6)]
            latents = [each.pop("latents") for each in runs]
            references = references or latents
            pairs = zip(latents, references, strict=True)
            errors = [rig.error(one, reference) for one, reference in pairs]
            row = {"situation": situation.name, "backend": backend, "errors": errors, "runs": runs}
            row |= memory.take()
            print(line(situation.name, backend, row), flush=True)
            yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="*", default=["inductor", "cudagraph"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--free", type=float, help="GiB of the card that are free")
    parser.add_argument("--only", nargs="*", help="names of situations")
    parser.add_argument("--restart", action="store_true", help="also measure first prompts of new servers")
    parser.add_argument("--wan", help="a file in models/diffusion_models")
    parser.add_argument("--argument", action="append", default=[], help="an extra argument for ComfyUI")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help="the server's folder, with its files and log")
    options = parser.parse_args()
    setup = command.prepare()
    paths = {kind: generated.ensure(kind, setup.python, setup.comfyui) for kind in ("sdxl", "sd15")}
    write_loras(paths["sdxl"])
    files = {kind: path.name for kind, path in paths.items()} | ({"wan": options.wan} if options.wan else {})
    folder = options.folder or Path(tempfile.mkdtemp(prefix="resolute-dynamic-"))
    budget = {} if options.free is None else {"RESOLUTE_BUDGET_MB": str(int(options.free * 1024 / 8))}

    def server() -> ComfyServer:
        return rig.server(setup, folder, options.argument, environment=budget)

    result: dict[str, Any] = {"arguments": without_paths(options.argument), "free_gib": options.free}
    result |= {"steps": options.steps, "rows": [], "first": []}

    def keep(kind: str, row: dict[str, Any]) -> None:
        result[kind].append(row)
        rig.save(options.out, result)

    torch.zeros(1, device="cuda")  # this process's own context counts in every measurement alike
    with small_card(options.free):
        with server() as running:
            result |= environment(running)
            assert running.process is not None
            memory = Memory(psutil.Process(running.process.pid))
            try:
                for row in measure(running.client, options, files, memory):
                    keep("rows", row)
            finally:
                memory.close()
        for backend in [STOCK, *options.backends] if options.restart else []:
            with server() as running:
                first = run(running.client, SEQUENCE[0], backend, options.steps, 5, files)
                del first["latents"]
                keep("first", {"backend": backend, **first})
                print(f"first prompt after a restart: {backend:<10}{first['seconds']:6.2f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
