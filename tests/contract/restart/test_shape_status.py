"""Which sizes are ready, of all that the cache knows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


@pytest.fixture
def sizes(adapter: Callable[[str], ModuleType], comfy: None) -> Callable[..., list[tuple[int, int]]]:
    """`sizes((role, latent shape), ...)`: what is ready where these were captured."""
    readiness = adapter("restart.shape_status")
    keys = sys.modules[f"{readiness.__name__.partition('.')[0]}.compile_cache.keys"]

    def ready(*graphs: tuple[str, tuple[int, ...]]) -> list[tuple[int, int]]:
        captured = [(graph_key(keys, role, shape), SimpleNamespace(bytes=1, hits=0)) for role, shape in graphs]
        cache: Any = SimpleNamespace(captured=lambda: captured, shapes=SimpleNamespace(models=list))
        found: list[tuple[int, int]] = readiness.sizes(cache, torch.device("cpu"))
        return found

    return ready


def graph_key(keys: ModuleType, role: str, shape: tuple[int, ...]) -> Any:
    signature = keys.Signature((("latent", keys.TensorSpec(shape, "float16", "cuda")),), ())
    return keys.GraphKey(signature, keys.Role(role), "m" * 64, "inductor")


def test_pictures_that_were_sampled_with_and_without_deepcache_count_once_each(sizes: Any) -> None:
    picture, wide = (2, 4, 64, 64), (2, 4, 64, 128)
    graphs = [("unet", picture), ("deepcache_full", wide), ("deepcache_fast", wide), ("unet", picture)]
    assert sizes(*graphs) == [(64, 64), (128, 64)]


def test_decoders_controlnets_and_videos_do_not_count(sizes: Any) -> None:
    assert sizes(("vae_decode", (1, 4, 64, 64)), ("controlnet", (2, 4, 64, 64)), ("unet", (1, 16, 3, 64, 64))) == []
