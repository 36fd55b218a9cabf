"""A server with the plain loop as a node, and one check: DeepCache alone, before and after Compile Model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scripts.places import ROOT
from scripts.server.process import ComfyServer
from scripts.setup import comfyui

from ...conftest import linked_packs
from ..conftest import SCENARIO_PACK

pytest.register_assert_rewrite(f"{__package__}.kit")
from ..rig import Bench, Run  # noqa: E402
from .kit import COMPILE, REFERENCE, Check, changed  # noqa: E402 (after the line that has its assertions explained)

PACKS = {
    "resolute-scenario-pack": SCENARIO_PACK,
    "resolute-deepcache-pack": ROOT / "tests" / "comfy" / "deepcache" / "pack",
}


@pytest.fixture(scope="session")
def make_cache_server(make_server: Callable[..., ComfyServer]) -> Callable[[str], ComfyServer]:
    """``make_cache_server(version)``: a ComfyUI with the plain loop among its nodes."""
    return lambda version: make_server(version, packs={**linked_packs(), **PACKS})


@pytest.fixture(scope="session")
def cache_server(server: ComfyServer, make_cache_server: Callable[[str], ComfyServer]) -> ComfyServer:
    """The shared server where it has the plain loop among its nodes, else one of these tests' own."""
    known = server.client.get(f"/object_info/{REFERENCE['class_type']}")
    return server if known else make_cache_server(comfyui.TARGET)


@pytest.fixture(scope="session")
def cache_bench(cache_server: ComfyServer) -> Bench:
    return Bench(cache_server.client)


@pytest.fixture(scope="session")
def warm_cache(cache_bench: Bench, tiny_prompt: Any, seeds: Any) -> Run:
    """The first compiled prompt, at 256x256 and without DeepCache: the one that may compile."""
    whole = tiny_prompt(seed=next(seeds), steps=2)
    prompt = {name: part for name, part in whole.items() if name not in ("vae", "decode", "image")}
    return cache_bench.run(changed(prompt, COMPILE))


@pytest.fixture
def check(cache_bench: Bench, cache_server: ComfyServer, warm_cache: Run, pytestconfig: pytest.Config) -> Check:
    """See ``kit.Check``; every region of the tiny model is compiled by then."""
    return Check(cache_bench, cache_server, pytestconfig.getoption("--on-cuda"))


@pytest.fixture
def prompt(tiny_prompt: Any, seed: int) -> Any:
    """Ten steps of the tiny model at an odd size (latent 17x13), without a decoder: four full, six fast."""
    whole = tiny_prompt(seed=seed, width=136, height=104, steps=10)
    return {name: part for name, part in whole.items() if name not in ("vae", "decode", "image")}
