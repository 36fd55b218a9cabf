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
    """`sizes((role, latent shape), ..., cell=8)`: what is ready where these were captured."""
    readiness = adapter("process.shape_status")
    keys = sys.modules[f"{readiness.__name__.partition('.')[0]}.compile_cache.keys"]

    def ready(*graphs: tuple[str, tuple[int, ...]], cell: int = 8) -> list[tuple[int, int]]:
        captures = [SimpleNamespace(graph=graph_key(keys, role, shape)) for role, shape in graphs]
        captured = [(capture, SimpleNamespace(bytes=1, hits=0)) for capture in captures]

        def size_of(key: Any) -> str:  # as the runner of a model with such cells notes it
            *_, height, width = key.signature.latent_shape
            return f"{cell * width}x{cell * height}, batch 2"

        cache: Any = SimpleNamespace(captured=lambda: captured, shapes=SimpleNamespace(models=list, size_of=size_of))
        found: list[tuple[int, int]] = readiness.sizes(cache, torch.device("cpu"))
        return found

    return ready


def graph_key(keys: ModuleType, role: str, shape: tuple[int, ...]) -> Any:
    signature = keys.Signature((("latent", keys.TensorSpec(shape, "float16", "cuda")),), ())
    return keys.GraphKey(signature, keys.Role(role), "m" * 64, "inductor")


def test_pictures_that_were_sampled_with_and_without_deepcache_count_once_each(sizes: Any) -> None:
    picture, wide = (2, 4, 64, 64), (2, 4, 64, 128)
    graphs = [("unet", picture), ("deepcache_full", wide), ("deepcache_fast", wide), ("unet", picture)]
    assert sizes(*graphs) == [(512, 512), (1024, 512)]


def test_decoders_controlnets_and_videos_do_not_count(sizes: Any) -> None:
    assert sizes(("vae_decode", (1, 4, 64, 64)), ("controlnet", (2, 4, 64, 64)), ("unet", (1, 16, 3, 64, 64))) == []


def test_a_size_is_in_the_cells_of_its_own_model(sizes: Any) -> None:
    cascade, flux_2 = ("unet", (2, 16, 24, 24)), ("unet", (1, 128, 64, 96))
    assert sizes(cascade, cell=42) == [(1008, 1008)]
    assert sizes(flux_2, cell=16) == [(1536, 1024)]


def test_sound_in_the_form_of_a_picture_does_not_count(sizes: Any) -> None:
    assert sizes(("unet", (1, 8, 16, 256))) == []


def test_regions_of_another_version_of_comfyui_are_there_once_this_one_ran_them_too(
    adapter: Callable[[str], ModuleType], comfy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code may be other. What a model runs now tells which of them are still its own."""
    readiness = adapter("process.shape_status")
    keys = sys.modules[f"{readiness.__name__.partition('.')[0]}.compile_cache.keys"]
    can = SimpleNamespace(available=True, keeps_graphs=False, captures=True)
    everything = SimpleNamespace(locate=lambda found, *_: readiness.Located(on_disk=found), probe=lambda device: can)
    monkeypatch.setattr(readiness.registry, "get", lambda name: everything)
    cache: Any = SimpleNamespace(config=SimpleNamespace(application="ComfyUI 2"))

    def used(size: int, regions: str, version: int) -> Any:
        key = graph_key(keys, "unet", (2, 4, size, size))
        return readiness.UsedShape(key, frozenset(regions), application=f"ComfyUI {version}")

    def located(*graphs: Any) -> tuple[frozenset[str], frozenset[str]]:
        found = readiness.locate(graphs, cache, torch.device("cpu"))["inductor"]
        return found.on_disk, found.missing

    before = used(64, "abc", 1)
    assert located(before) == (frozenset(), frozenset("abc"))
    assert located(before, used(128, "abd", 2)) == (frozenset("abd"), frozenset("c"))

    def line(*graphs: Any) -> str:
        return str(readiness.line(SimpleNamespace(name="SDXL", graphs=graphs), cache, torch.device("cpu")))

    assert line(used(128, "abd", 2)) == "3 regions are there for 1 sizes of SDXL, 0 compiles expected"
    assert line(before).endswith("of SDXL, at most 3 compiles expected in this ComfyUI")  # nobody knows yet
