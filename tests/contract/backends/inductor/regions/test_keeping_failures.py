"""Whatever fails while code is kept, loaded or looked for costs a compile at most: the prompt gets its picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.backends.inductor.compiler import work
from compile_cache.backends.inductor.lower import artifacts, environment
from compile_cache.backends.inductor.lower.compiled_region import CompiledRegion
from compile_cache.backends.inductor.lower.shape_guards import ConfirmedSizes
from compile_cache.backends.inductor.regions import region, table
from compile_cache.store import artifact_store
from compile_cache.store.artifact_store import ArtifactStore
from compile_cache.store.shape_history import ShapeHistory

from ....rig import TOLERANCE, Attention, Bound, Rig, random, seeded

REAL_COMPILE = work.compile_trace
TENSORS = (random(2, 5, 16), random(2, 7, 16, seed=1))

# Every step between a call and the store. On each the test lets the step fail, in a process that compiles and in one
# that finds the region on disk.
STEPS: list[tuple[Any, str]] = [
    (work, "pack"),
    (artifacts, "measured"),
    (artifacts, "_payload"),
    (artifacts, "_pickled"),
    (region, "unpack"),
    (artifacts, "_load"),
    (artifacts, "private_cache"),
    (artifacts, "remove_other_source"),
    (artifacts, "launch_by_address"),
    (environment, "environment_of"),
    (environment, "portable_config"),
    (artifact_store, "write_file"),
    (artifact_store, "read_regular_file"),
    (artifact_store, "make_private"),
    (artifact_store, "canonical_json"),
    (ArtifactStore, "load"),
    (ArtifactStore, "save"),
    (ArtifactStore, "names"),
    (ArtifactStore, "discard"),
    (ArtifactStore, "_trim"),
    (ShapeHistory, "_write"),
]
ERRORS = [RuntimeError("injected"), OSError(28, "no space left on device"), TypeError("injected"), KeyError("injected")]


def process(store: Path) -> Rig:
    return Rig(InductorBackend(), store_folder=store, source="one", workers=0)


def bound(rig: Rig) -> Bound:
    return rig.bind(seeded(Attention))


@pytest.fixture(scope="module")
def made() -> list[CompiledRegion]:
    """The region of the model, once it was compiled: the C++ compiler takes seconds."""
    return []


@pytest.fixture(autouse=True)
def _compiled_once(made: list[CompiledRegion], monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_trace(traced: Any, keep: bool) -> CompiledRegion:
        if not made:
            made.append(REAL_COMPILE(traced, keep=True))
        return replace(made[0], confirmed=ConfirmedSizes())

    monkeypatch.setattr(work, "compile_trace", compile_trace)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """With the region of the model."""
    bound(process(tmp_path / "store"))(*TENSORS)
    return tmp_path / "store"


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str, BaseException], list[int]]:
    """Lets a function raise. The list gets an entry for each call of it."""

    def fail(owner: Any, name: str, error: BaseException) -> list[int]:
        calls: list[int] = []

        def raise_it(*_: Any, **__: Any) -> Any:
            calls.append(1)
            raise error

        monkeypatch.setattr(owner, name, raise_it)
        return calls

    return fail


@pytest.mark.parametrize(("owner", "name"), STEPS, ids=[name for _, name in STEPS])
def test_a_failure_beside_a_stored_region_costs_no_prompt(
    store: Path, failing: Callable[..., list[int]], owner: Any, name: str
) -> None:
    error = ERRORS[len(name) % len(ERRORS)]
    failing(owner, name, error)
    rig = process(store)
    model = bound(rig)
    for _ in range(2):
        assert model.error(*TENSORS) <= TOLERANCE
    rig.backend.stored()
    rig.backend.locate(model.program.region_keys, torch.device("cpu"), rig.cache.config)
    assert rig.cache.stats.counters.compile_failures == 0
    assert rig.cache.stats.counters.region_calls == 2, "the region ran compiled all the same"


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_region_that_cannot_be_kept_runs_and_the_log_says_why(
    tmp_path: Path, failing: Callable[..., list[int]], caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    calls = failing(artifacts, "_pickled", error)
    rig = process(tmp_path)
    with caplog.at_level("INFO"), rig.expect(region_compiles=1, verifications=1, region_calls=1, graph_calls=1):
        assert bound(rig).error(*TENSORS) <= TOLERANCE
    assert calls == [1]
    assert "Attention is compiled again after a restart" in caplog.text


def test_looking_that_fails_for_another_reason_runs_the_original_and_says_so(
    tmp_path: Path, failing: Callable[..., list[int]]
) -> None:
    failing(table, "_find_in_memory", ValueError("injected"))
    rig = process(tmp_path)
    with rig.expect({"compile_failed": 1}, eager_calls=1):
        assert bound(rig).error(*TENSORS) == 0
    assert "ValueError: injected" in rig.details[0]


def test_hooks_that_cannot_be_built_leave_the_model_as_it_is(caplog: pytest.LogCaptureFixture, cold: Rig) -> None:
    def build(run: Any, bypass: Any) -> Any:
        raise AttributeError("a newer ComfyUI has no such block")

    model = cold.bind(seeded(Attention), build)
    with cold.expect({"no_regions": 2}, eager_calls=2):
        for _ in range(2):
            assert model.error(*TENSORS) == 0
    assert "a newer ComfyUI has no such block" in cold.details[0]
    assert "cannot be read" in caplog.text
