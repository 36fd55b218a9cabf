"""Shared code of the benchmarks that drive a ComfyUI server: prompts, latents, counters, result files."""

from __future__ import annotations

import datetime
import io
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy

from scripts.models import generated
from scripts.places import ROOT
from scripts.server.client import Client, History
from scripts.server.process import ComfyServer
from scripts.setup import command

OURS, STOCK = "resolute", "stock"
STEPS = 20
LOG_LINES = ("attention", "comfy_kitchen", "Set vram state", "Device:")  # lines of ComfyUI's log about the machine
COMPILE_TIMEOUT = 120.0  # seconds that background compiles may take after a server's first prompts
NO_GAIN = "is not captured, since that"  # in the pack's log: the GPU is always busy even without a capture

Size = tuple[int, int, int, str]  # width, height, batch, text


def server(setup: command.Setup, folder: Path, arguments: list[str], **settings: Any) -> ComfyServer:
    """A CUDA server with Resolute and the test nodes. settings: of ComfyServer; its `packs` are added to ours."""
    packs = {"resolute": ROOT, "resolute-test-pack": ROOT / "tests" / "pack", **settings.pop("packs", {})}
    settings = {"models": generated.folder(), "cpu": False, "arguments": arguments, **settings}
    waits = {"RESOLUTE_COMPILE": "before"}  # compile first, so that timed calls are compiled
    settings["environment"] = {**waits, **(settings.get("environment") or {})}
    return ComfyServer(setup.python, setup.comfyui, folder, packs=packs, **settings)


def node(kind: str, /, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def sampled(
    nodes: Mapping[str, Any], model: list[Any], seed: int, steps: int, cfg: float, scheduler: str = "normal"
) -> dict[str, Any]:
    """The nodes, plus a sampler of their conditioning and latent, and a node that saves its latents."""
    sampler = node(
        "KSampler", model=model, seed=seed, steps=steps, cfg=cfg, sampler_name="euler", scheduler=scheduler,
        positive=["positive", 0], negative=["negative", 0], latent_image=["latent", 0], denoise=1.0,
    )  # fmt: skip
    saved = node("ResoluteTestSaveLatent", samples=["sample", 0], filename_prefix="latents")
    return {**nodes, "sample": sampler, "latents": saved}


def prompt(checkpoint: str, size: Size, steps: int = STEPS, seed: int = 1) -> dict[str, Any]:
    """A stock text-to-image prompt with a checkpoint."""
    width, height, batch, text = size
    nodes: dict[str, Any] = {
        "load": node("CheckpointLoaderSimple", ckpt_name=checkpoint),
        "positive": node("CLIPTextEncode", clip=["load", 1], text=text),
        "negative": node("CLIPTextEncode", clip=["load", 1], text="blurry"),
        "latent": node("EmptyLatentImage", width=width, height=height, batch_size=batch),
    }
    nodes = sampled(nodes, ["load", 0], seed, steps, 7.0)
    return nodes | decoded("sample", ["load", 2])


def decoded(sampler: str, vae: list[Any]) -> dict[str, Any]:
    """Nodes that decode a sampler's latents and save the images."""
    return {
        "decode": node("VAEDecode", samples=[sampler, 0], vae=vae),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="images"),
    }


def with_model_node(nodes: dict[str, Any], name: str, kind: str, /, **inputs: Any) -> dict[str, Any]:
    """The prompt with one more node between the model and each sampler. name: of the first; others are numbered."""
    samplers = [each for each in nodes.values() if each["class_type"].startswith("KSampler")]
    for number, sampler in enumerate(samplers):
        own = f"{name}{number or ''}"
        nodes[own] = node(kind, model=sampler["inputs"]["model"], **inputs)
        sampler["inputs"]["model"] = [own, 0]
    return nodes


def compiled(nodes: dict[str, Any], backend: str) -> dict[str, Any]:
    """The prompt with Resolute's nodes added, the only difference to stock's."""
    nodes = with_model_node(nodes, "compile", "ResoluteCompileModel", backend=backend)
    decodes = [each for each in nodes.values() if each["class_type"] == "VAEDecode"]
    if decodes:
        nodes["compile_vae"] = node("ResoluteCompileVAEDecode", vae=decodes[0]["inputs"]["vae"], backend=backend)
    for decode in decodes:
        decode["inputs"]["vae"] = ["compile_vae", 0]
    return nodes


def with_lora(nodes: dict[str, Any], file: str, strength: float = 1.0) -> dict[str, Any]:
    """Stock's prompt with a LoRA."""
    return with_model_node(nodes, "lora", "LoraLoaderModelOnly", lora_name=file, strength_model=strength)


def counters(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/resolute/cache")["counters"]
    return found


def rise(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The increase of each counter; bypasses by code, without codes that did not increase."""
    codes = {code: count - before["bypasses"].get(code, 0) for code, count in after["bypasses"].items()}
    risen = {name: after[name] - before[name] for name in after if name != "bypasses"}
    return {**risen, "bypasses": {code: count for code, count in codes.items() if count}}


def until_compiled(client: Client, seconds: float) -> dict[str, Any]:
    """Wait, for at most `seconds`, until no compile is pending and none has ended for some seconds. Returns the
    `waited_seconds` and the counter `region_compiles`.
    """
    began = since = time.monotonic()
    compiles = None
    while (now := time.monotonic()) - began < seconds:
        found = client.get("/resolute/cache")
        coming = (found.get("coming") or {}).get("regions", 0)
        if coming or found["counters"]["region_compiles"] != compiles:
            compiles, since = found["counters"]["region_compiles"], now
        elif now - since >= (2.0 if "coming" in found else 15.0):
            break
        time.sleep(0.5)
    return {"waited_seconds": round(now - began, 1), "region_compiles": compiles}


def latents(client: Client, history: History) -> Any:
    """All latents that a prompt saved, as one vector."""
    files = [numpy.load(io.BytesIO(file)).ravel() for file in client.images(history, "latents")]
    return numpy.concatenate(files).astype("float64")


def error(found: Any, reference: Any) -> float:
    """The relative error of latents, by norm."""
    return float(numpy.linalg.norm(found - reference) / numpy.linalg.norm(reference))


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:300]


def variables(given: list[str]) -> dict[str, str]:
    """The variables of `--environment NAME=VALUE`."""
    return dict(each.split("=", 1) for each in given)


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def gpu() -> str | None:
    """The GPU's name, driver and memory, as nvidia-smi prints them; None without nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    if shutil.which(query[0]) is None:
        return None
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


def environment(running: ComfyServer) -> dict[str, Any]:
    """The date, GPU and software with which a result was measured."""
    stats = running.client.get("/system_stats")
    return {
        "date": now(),
        "gpu": gpu(),
        "devices": stats.get("devices"),
        "system": {key: stats["system"].get(key) for key in ("comfyui_version", "python_version", "pytorch_version")},
    }


def commit_of(folder: Path, given: str | None) -> dict[str, Any]:
    """The commit of a checkout, and if files differ from it. given: the commit by the caller; it takes precedence."""

    def git(*arguments: str) -> str | None:
        if shutil.which("git") is None:
            return None
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)  # noqa: S607
        return done.stdout.strip() if done.returncode == 0 else None

    top = git("rev-parse", "--show-toplevel")
    is_own = top is not None and Path(top).resolve() == folder.resolve()  # not an enclosing repository
    found, changes = (git("rev-parse", "HEAD"), git("status", "--porcelain")) if is_own else (None, None)
    dirty = None if changes is None or (given and given != found) else bool(changes)
    return {"commit": given or found or "unknown", "is_dirty": dirty}


def without_paths(arguments: list[str]) -> list[str]:
    """ComfyUI's arguments for the result file, with FOLDER in place of this machine's paths."""
    return ["FOLDER" if Path(argument).is_absolute() else argument for argument in arguments]


def save(out: Path | None, result: Mapping[str, Any]) -> None:
    """Write the results so far, so that an interrupted run keeps them. The write is atomic."""
    if out:
        partial = out.with_name(f"{out.name}.partial")
        partial.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        os.replace(partial, out)
