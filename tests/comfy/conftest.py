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
from .rig import checkpoint_prompt as make_checkpoint_prompt  # noqa: E402
from .rig import node as make_node  # noqa: E402
from .rig import tiny_prompt as make_tiny_prompt  # noqa: E402


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
    return bench.run(compiled(make_tiny_prompt(seed=next(seeds))))


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
    return make_node


@pytest.fixture(scope="session")
def tiny_prompt() -> Callable[..., PromptDict]:
    """Builds a prompt of the test pack's tiny model; see ``rig.tiny_prompt`` for its nodes."""
    return make_tiny_prompt


@pytest.fixture
def prompt(tiny_prompt: Any, seed: int) -> PromptDict:
    """Four steps of the tiny model at an odd size (a latent of 17x13), without a decoder."""
    return without_decoder(tiny_prompt(seed=seed, width=136, height=104, steps=4))


@pytest.fixture(scope="session")
def checkpoint_prompt() -> Callable[..., PromptDict]:
    """Builds text to image from a checkpoint; see ``rig.checkpoint_prompt`` for its nodes."""
    return make_checkpoint_prompt
