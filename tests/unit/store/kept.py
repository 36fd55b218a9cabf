"""What is kept on disk: how a number is written into a folder, which numbers are read there, and its files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from compile_cache.cache.capture_policy import CapturePolicy
from compile_cache.cache.captures import Captures, capture_key
from compile_cache.cache.graph_cache import GraphCache
from compile_cache.config import CacheConfig
from compile_cache.errors import NoGainError
from compile_cache.keys import GraphKey
from compile_cache.store.artifact_store import Artifact, StoreError
from compile_cache.store.shape_history import ShapeHistory
from compile_cache.telemetry.stats import Stats

from ..fakes import FakeProgram, Module
from ..tuning.test_tuner import CHOICE, GPU, shape, tuner
from .test_artifact_store import KEY, artifact, store_in

NUMBERS = (1, 2, 3)


def region(number: int) -> Artifact:
    return artifact(payload=b"machine code " + bytes([number]), static=[[0, number]])


def save_region(folder: Path, number: int) -> None:
    with contextlib.suppress(StoreError):  # without a store, regions are kept in memory
        store_in(folder).save(region(number))


def stored_regions(folder: Path) -> set[int]:
    store = store_in(folder)
    found = {each.payload[-1]: replace(each, label="ResBlock") for each in store.load(KEY)}  # no digest has the label
    assert found == {number: region(number) for number in found}
    assert len(store.names()) <= 3 and store.report()["regions"] <= 3
    return set(found)


def regions(folder: Path) -> set[int]:
    with contextlib.suppress(StoreError, OSError):
        return stored_regions(folder)
    return set()


def graph(number: int) -> GraphKey:
    return replace(Module().call(number).key, model="a" * 64)


def record_shape(folder: Path, number: int) -> None:
    ShapeHistory(folder / "shapes").record(graph(number), FakeProgram())


def shapes(folder: Path) -> set[int]:
    history = ShapeHistory(folder / "shapes")
    listed = [kept for model in history.models() for kept in model.graphs]
    return {kept.key.signature.latent_shape[-1] for kept in [*history.of_model("a" * 64), *listed]}


def set_choice(folder: Path, number: int) -> None:
    tuner(folder / "choices").set(GPU, shape(number), CHOICE)


def choices(folder: Path) -> set[int]:
    return {each.q[2] for each, _ in tuner(folder / "choices").on(GPU)}


def refuse_a_capture(folder: Path, number: int) -> None:
    program = FakeProgram()
    program.capture_failure = NoGainError(0.25)
    GraphCache(CacheConfig(store_folder=folder)).run(program, Module().call(number))


def refused_captures(folder: Path) -> set[int]:
    capture_policy = CapturePolicy(Captures(0), Stats(), CacheConfig(store_folder=folder))
    return {each for each in NUMBERS if capture_policy.gains_nothing(capture_key(FakeProgram(), Module().call(each)))}


Write = Callable[[Path, int], object]
Read = Callable[[Path], set[int]]
KEPT: dict[str, tuple[Write, Read, str]] = {
    "a region": (save_region, regions, "*/*.region"),
    "shapes": (record_shape, shapes, "shapes/*.json"),
    "choices": (set_choice, choices, "choices/*.json"),
    "refused captures": (refuse_a_capture, refused_captures, "captures/*.json"),
}
