"""Real ComfyUI servers on the CPU, and prompts to send to them."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from PIL import Image

from scripts.support import comfyui
from scripts.support.client import Client, History
from scripts.support.server import ComfyServer

PromptDict = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def server(make_server: Callable[..., ComfyServer]) -> ComfyServer:
    """The target ComfyUI, shared by the session."""
    return make_server()


@pytest.fixture(scope="session")
def old_server(make_server: Callable[..., ComfyServer]) -> ComfyServer:
    """The oldest supported ComfyUI, shared by the session."""
    return make_server(comfyui.OLDEST)


@pytest.fixture
def client(server: ComfyServer) -> Client:
    """A client of the shared target server."""
    return server.client


@pytest.fixture
def old_client(old_server: ComfyServer) -> Client:
    """A client of the shared oldest server."""
    return old_server.client


@pytest.fixture(scope="session")
def node() -> Callable[..., dict[str, Any]]:
    """``node("KSampler", model=["1", 0], ...)``: one node of a prompt in API form."""
    return _node


@pytest.fixture(scope="session")
def tiny_prompt() -> Callable[..., PromptDict]:
    """Builds a prompt of the test pack's tiny model; see ``_tiny_prompt`` for its nodes."""
    return _tiny_prompt


@pytest.fixture(scope="session")
def checkpoint_prompt() -> Callable[..., PromptDict]:
    """Builds text to image from a checkpoint; see ``_checkpoint_prompt`` for its nodes."""
    return _checkpoint_prompt


@pytest.fixture(scope="session")
def latents() -> Callable[[Client, History], list[numpy.ndarray[Any, Any]]]:
    """``latents(client, history)``: what ResoluteTestSaveLatent wrote, exactly."""
    return lambda client, history: [numpy.load(io.BytesIO(data)) for data in client.images(history, "latents")]


@pytest.fixture(scope="session")
def pixels() -> Callable[[Client, History], list[numpy.ndarray[Any, Any]]]:
    """``pixels(client, history)``: the images as arrays (height, width, 3), 0 to 255."""
    return lambda client, history: [
        numpy.asarray(Image.open(io.BytesIO(data)).convert("RGB")) for data in client.images(history)
    ]


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

    Each is a key, so that a test can put a node between them.
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
