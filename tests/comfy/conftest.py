"""Fixtures: real ComfyUI servers on the CPU, and prompts for them."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scripts.server.client import Client
from scripts.server.process import ComfyServer
from scripts.setup import comfyui

pytest.register_assert_rewrite(f"{__package__}.rig")
from .families.kit import forget_regions  # noqa: E402
from .in_process import load  # noqa: E402
from .rig import Bench, PromptDict, Run, compiled, without_decoder  # noqa: E402 (after register_assert_rewrite)


@pytest.fixture(scope="session")
def server(make_server: Callable[..., ComfyServer], pytestconfig: pytest.Config) -> ComfyServer:
    """The target ComfyUI, shared by the session."""
    return make_server(
        cpu=not pytestconfig.getoption("--on-cuda"),
        arguments=pytestconfig.getoption("--server-argument"),
    )


@pytest.fixture(scope="session")
def old_server(make_server: Callable[..., ComfyServer]) -> ComfyServer:
    """The oldest supported ComfyUI, shared by the session."""
    return make_server(comfyui.OLDEST)


@pytest.fixture(scope="session")
def example_picture(server: ComfyServer, comfyui_folder: Callable[[str], Path]) -> None:
    """ComfyUI's own picture in the shared server's input folder, where LoadImage looks for it."""
    example = comfyui_folder(comfyui.TARGET) / "input" / "example.png"
    shutil.copyfile(example, server.input_folder / example.name)


@pytest.fixture
def client(server: ComfyServer) -> Client:
    """A client of the shared target server."""
    return server.client


@pytest.fixture(scope="session")
def bench(server: ComfyServer) -> Bench:
    """Runs prompts on the shared target server and reports the counters of each."""
    return Bench(server.client)


@pytest.fixture(scope="session")
def seeds() -> Iterator[int]:
    """Seeds that no other prompt of the session has, because ComfyUI answers a repeated prompt from its cache."""
    return itertools.count(1000)


@pytest.fixture
def seed(seeds: Iterator[int]) -> int:
    """A seed for this test alone."""
    return next(seeds)


@pytest.fixture(scope="session")
def warm(bench: Bench, seeds: Iterator[int]) -> Run:
    """The first compiled prompt of the tiny model and VAE on the shared server, at 256x256; it compiles the regions."""
    return bench.run(compiled(_tiny_prompt(seed=next(seeds))))


@pytest.fixture(scope="module")
def core() -> Iterator[SimpleNamespace]:
    """ComfyUI's own modules and ours in this process; see ``in_process.load``. Each file compiles its own regions."""
    modules = load()
    yield modules
    forget_regions(modules)


@pytest.fixture
def inference() -> Iterator[None]:
    """How ComfyUI calls a model."""
    with torch.inference_mode():
        yield


@pytest.fixture(scope="session")
def node() -> Callable[..., dict[str, Any]]:
    """``node("KSampler", model=["1", 0], ...)`` makes one node of a prompt in API form."""
    return _node


@pytest.fixture(scope="session")
def tiny_prompt() -> Callable[..., PromptDict]:
    """Builds a prompt of the test pack's tiny model; see ``_tiny_prompt`` for its nodes."""
    return _tiny_prompt


@pytest.fixture
def prompt(tiny_prompt: Any, seed: int) -> PromptDict:
    """Four steps of the tiny model at an odd size (a latent of 17x13), without a decoder."""
    return without_decoder(tiny_prompt(seed=seed, width=136, height=104, steps=4))


@pytest.fixture(scope="session")
def checkpoint_prompt() -> Callable[..., PromptDict]:
    """Builds text to image from a checkpoint; see ``_checkpoint_prompt`` for its nodes."""
    return _checkpoint_prompt


def _node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def _tiny_prompt(
    *,
    seed: int = 1,
    kind: str = "sd",
    width: int = 256,
    height: int = 256,
    batch: int = 1,
    tokens: int = 77,
    steps: int = 4,
    cfg: float = 5.0,
) -> PromptDict:
    """Nodes: model, vae, positive, negative, latent, sample, decode, image, samples.

    The names are the keys of the prompt, so that a test can insert nodes.
    """
    widths = {"sd": (768, 0), "sdxl": (2048, 1280)}[kind]
    text = {"tokens": tokens, "width": widths[0], "pooled_width": widths[1], "batch": 1}
    return {
        "model": _node("ResoluteTestTinyModel", seed=0, kind=kind),
        "vae": _node("ResoluteTestTinyVAE", seed=0),
        "positive": _node("ResoluteTestConditioning", seed=11, **text),
        "negative": _node("ResoluteTestConditioning", seed=12, **text),
        "latent": _node("EmptyLatentImage", width=width, height=height, batch_size=batch),
        "sample": _sampler(["model", 0], seed, steps, cfg),
        "decode": _node("VAEDecode", samples=["sample", 0], vae=["vae", 0]),
        "image": _node("SaveImage", images=["decode", 0], filename_prefix="tiny"),
        "samples": _node("ResoluteTestSaveLatent", samples=["sample", 0], filename_prefix="tiny"),
    }


def _checkpoint_prompt(
    checkpoint: str,
    *,
    text: str = "a lighthouse in the rain",
    seed: int = 1,
    width: int = 64,
    height: int = 64,
    batch: int = 1,
    steps: int = 2,
    cfg: float = 5.0,
) -> PromptDict:
    """Nodes: loader, positive, negative, latent, sample, decode, image, samples."""
    return {
        "loader": _node("CheckpointLoaderSimple", ckpt_name=checkpoint),
        "positive": _node("CLIPTextEncode", text=text, clip=["loader", 1]),
        "negative": _node("CLIPTextEncode", text="", clip=["loader", 1]),
        "latent": _node("EmptyLatentImage", width=width, height=height, batch_size=batch),
        "sample": _sampler(["loader", 0], seed, steps, cfg),
        "decode": _node("VAEDecode", samples=["sample", 0], vae=["loader", 2]),
        "image": _node("SaveImage", images=["decode", 0], filename_prefix="checkpoint"),
        "samples": _node("ResoluteTestSaveLatent", samples=["sample", 0], filename_prefix="cp"),
    }


def _sampler(model: list[Any], seed: int, steps: int, cfg: float) -> dict[str, Any]:
    return _node(
        "KSampler",
        model=model,
        positive=["positive", 0],
        negative=["negative", 0],
        latent_image=["latent", 0],
        seed=seed,
        steps=steps,
        cfg=cfg,
        sampler_name="euler",
        scheduler="normal",
        denoise=1.0,
    )
