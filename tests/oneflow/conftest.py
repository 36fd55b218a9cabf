"""Fixtures with the real oneflow and onediff, and ComfyUI on the CPU. A missing package is an error, never a skip."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from compile_cache.backends.oneflow.packages import installed
from compile_cache.backends.oneflow.runtime import runtime
from scripts.places import ROOT
from scripts.server.process import ComfyServer
from scripts.setup import comfyui

from ..conftest import linked_packs

pytest.register_assert_rewrite(f"{__package__}.rig", f"{__package__.rpartition('.')[0]}.comfy.rig")
from ..comfy.rig import Bench, PromptDict, node  # noqa: E402 (after the line that has its assertions explained)
from .rig import close_all  # noqa: E402


def pytest_report_header() -> str:
    """Print the versions under test."""
    return f"OneFlow: {installed()}"


@pytest.fixture(scope="session", autouse=True)
def _packages_are_there() -> None:
    found = installed()
    assert found.oneflow, "OneFlow is not installed: run `scripts/test --oneflow`, which makes its environment"
    assert found.onediff, "onediff is not installed: run `scripts/test --oneflow`, which makes its environment"


@pytest.fixture(scope="session", autouse=True)
def _no_limit_of_graphs() -> None:
    """The tests build many tiny graphs; the limit is meant for real models."""
    runtime().max_graphs = 10_000


@pytest.fixture(scope="module", autouse=True)
def _graphs_are_closed() -> Iterator[None]:
    yield
    close_all()


@pytest.fixture(scope="session")
def comfy(comfyui_folder: Callable[[str], Path]) -> None:
    """Make ComfyUI's own modules importable, for the CPU."""
    sys.path.append(str(comfyui_folder(comfyui.TARGET)))  # last: it has a `tests` too
    import comfy.cli_args

    comfy.cli_args.args.cpu = True


@pytest.fixture(scope="session")
def comfy_server(make_server: Callable[..., ComfyServer]) -> ComfyServer:
    """ComfyUI with OneFlow and a large budget, because on the CPU OneFlow never reuses memory within a graph."""
    packs = {**linked_packs(), "resolute-demo-model": ROOT / "scripts" / "models" / "demo_model"}
    return make_server(packs=packs, environment={"RESOLUTE_BUDGET_MB": "10000"})


@pytest.fixture(scope="session")
def bench(comfy_server: ComfyServer) -> Bench:
    """Runs prompts on the server and reports the counters of each."""
    return Bench(comfy_server.client)


@pytest.fixture(scope="session")
def seeds() -> Iterator[int]:
    """Seeds that no other prompt of the session has, because ComfyUI answers a repeated prompt from its cache."""
    return itertools.count(5000)


@pytest.fixture
def prompt(seeds: Iterator[int]) -> Callable[..., PromptDict]:
    """Builds a prompt that samples the tiny SD1.5-like model, latent 17x13, with a new seed each time."""

    def build(steps: int = 2) -> PromptDict:
        text = {"tokens": 77, "width": 768, "pooled_width": 0, "batch": 1}
        return {
            "model": node("ResoluteTestTinyModel", seed=0, kind="sd"),
            "positive": node("ResoluteTestConditioning", seed=11, **text),
            "negative": node("ResoluteTestConditioning", seed=12, **text),
            "latent": node("EmptyLatentImage", width=136, height=104, batch_size=1),
            "sample": node(
                "KSampler",
                model=["model", 0],
                positive=["positive", 0],
                negative=["negative", 0],
                latent_image=["latent", 0],
                seed=next(seeds),
                steps=steps,
                cfg=5.0,
                sampler_name="euler",
                scheduler="normal",
                denoise=1.0,
            ),
            "samples": node("ResoluteTestSaveLatent", samples=["sample", 0], filename_prefix="tiny"),
        }

    return build
