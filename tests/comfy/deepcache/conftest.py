"""One check of DeepCache: alone, before and after Compile Model, against the plain loop of the test pack."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.server.process import ComfyServer

pytest.register_assert_rewrite(f"{__package__}.kit")
from ..rig import Bench, Run, without_decoder  # noqa: E402
from .kit import COMPILE, Check, changed  # noqa: E402 (after register_assert_rewrite)


@pytest.fixture(scope="session")
def warm_cache(bench: Bench, tiny_prompt: Any, seeds: Any) -> Run:
    """The first compiled prompt, at 256x256 and without DeepCache: the one that may compile."""
    whole = tiny_prompt(seed=next(seeds), steps=2)
    prompt = without_decoder(whole)
    return bench.run(changed(prompt, COMPILE))


@pytest.fixture
def check(bench: Bench, server: ComfyServer, warm_cache: Run, pytestconfig: pytest.Config) -> Check:
    """See ``kit.Check``; every region of the tiny model is compiled by then."""
    return Check(bench, server, pytestconfig.getoption("--on-cuda"))


@pytest.fixture
def prompt(tiny_prompt: Any, seed: int) -> Any:
    """Ten steps of the tiny model at an odd size (latent 17x13), without a decoder: four full, six fast."""
    whole = tiny_prompt(seed=seed, width=136, height=104, steps=10)
    return without_decoder(whole)
