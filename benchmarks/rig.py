"""Shared code of the benchmarks that drive a ComfyUI: server, prompts, latents, counters, files of results."""

from __future__ import annotations

import datetime
import io
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from scripts.models import generated
from scripts.places import ROOT
from scripts.server.client import Client, History
from scripts.server.process import ComfyServer
from scripts.setup import command

STOCK = "stock"
STEPS = 20


class Sampler(NamedTuple):
    """How a prompt samples. name, scheduler: as KSampler names them."""

    name: str = "euler"
    steps: int = STEPS
    cfg: float = 7.0
    scheduler: str = "normal"


EULER, LCM = Sampler(), Sampler("lcm", 4, 1.0, "sgm_uniform")


def server(setup: command.Setup, folder: Path, arguments: list[str], **settings: Any) -> ComfyServer:
    """A server on CUDA with Resolute and the test nodes. settings: of ComfyServer; `packs` come in addition."""
    packs = {"resolute": ROOT, "resolute-test-pack": ROOT / "tests" / "pack", **settings.pop("packs", {})}
    settings = {"models": generated.folder(), "cpu": False, "arguments": arguments, **settings}
    return ComfyServer(setup.python, setup.comfyui, folder, packs=packs, **settings)


def node(kind: str, /, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def sampled(
    nodes: Mapping[str, Any],
    model: list[Any],
    seed: int,
    steps: int,
    cfg: float,
    scheduler: str = "normal",
    name: str = "euler",
) -> dict[str, Any]:
    """The nodes with a sampler of their prompts and latent, and with its latents saved."""
    sampler = node(
        "KSampler", model=model, seed=seed, steps=steps, cfg=cfg, sampler_name=name, scheduler=scheduler,
        positive=["positive", 0], negative=["negative", 0], latent_image=["latent", 0], denoise=1.0,
    )  # fmt: skip
    saved = node("ResoluteTestSaveLatent", samples=["sample", 0], filename_prefix="latents")
    return {**nodes, "sample": sampler, "latents": saved}


def prompt(
    checkpoint: str,
    backend: str,
    size: tuple[int, int, int, str],
    steps: int = STEPS,
    seed: int = 1,
    sampler: Sampler = EULER,
) -> dict[str, Any]:
    """Text to image with core's nodes; adds Resolute's nodes or TorchCompileModel unless `backend` is stock.

    size: width, height, batch, text. steps: in place of the sampler's.
    """
    width, height, batch, text = size
    model, vae = ["load", 0], ["load", 2]
    nodes: dict[str, Any] = {
        "load": node("CheckpointLoaderSimple", ckpt_name=checkpoint),
        "positive": node("CLIPTextEncode", clip=["load", 1], text=text),
        "negative": node("CLIPTextEncode", clip=["load", 1], text="blurry"),
        "latent": node("EmptyLatentImage", width=width, height=height, batch_size=batch),
    }
    if backend == "TorchCompileModel":
        nodes["compile"] = node("TorchCompileModel", model=model, backend="inductor")
        model = ["compile", 0]
    elif backend != STOCK:
        nodes["compile"] = node("ResoluteCompileModel", model=model, backend=backend)
        nodes["compile_vae"] = node("ResoluteCompileVAEDecode", vae=vae, backend=backend)
        model, vae = ["compile", 0], ["compile_vae", 0]
    nodes = sampled(nodes, model, seed, steps, sampler.cfg, sampler.scheduler, sampler.name)
    nodes["decode"] = node("VAEDecode", samples=["sample", 0], vae=vae)
    nodes["save"] = node("SaveImage", images=["decode", 0], filename_prefix="images")
    return nodes


def counters(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/resolute/cache")["counters"]
    return found


def rise(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """By how much each counter rose; bypasses by their codes, without those that did not."""
    codes = {code: count - before["bypasses"].get(code, 0) for code, count in after["bypasses"].items()}
    risen = {name: after[name] - before[name] for name in after if name != "bypasses"}
    return {**risen, "bypasses": {code: count for code, count in codes.items() if count}}


def latents(client: Client, history: History) -> Any:
    """All latents that a prompt saved, as one vector."""
    files = [numpy.load(io.BytesIO(file)).ravel() for file in client.images(history, "latents")]
    return numpy.concatenate(files).astype("float64")


def error(found: Any, reference: Any) -> float:
    """The relative error of latents."""
    return float(numpy.linalg.norm(found - reference) / numpy.linalg.norm(reference))


def passes(log: str) -> list[dict[str, int]]:
    """The passes that DeepCache reports in a server's log, each kind of run once."""
    found = sorted(set(re.findall(r"DeepCache: .*?(\d+) full and (\d+) fast passes", log)))
    return [{"full": int(full), "fast": int(fast)} for full, fast in found]


def environment(running: ComfyServer) -> dict[str, Any]:
    """When and on what a result was measured."""
    stats = running.client.get("/system_stats")
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    has_gpu = shutil.which(query[0]) is not None
    gpu = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip() if has_gpu else None
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": gpu,
        "devices": stats.get("devices"),
        "system": {key: stats["system"].get(key) for key in ("comfyui_version", "python_version", "pytorch_version")},
    }


def without_paths(arguments: list[str]) -> list[str]:
    """ComfyUI's arguments for the result file, with FOLDER in place of this machine's paths."""
    return ["FOLDER" if Path(argument).is_absolute() else argument for argument in arguments]


def save(out: Path | None, result: Mapping[str, Any]) -> None:
    """Write what was measured so far, so that an interrupted run has results. A file is never half written."""
    if out:
        partial = out.with_name(f"{out.name}.partial")
        partial.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        os.replace(partial, out)
