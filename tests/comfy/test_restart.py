"""A restart compiles nothing again: after a clean end, after a kill, and next to another server.

Each server starts with an empty inductor cache, so that only Resolute's store can help. The database is a file, as by
default, so that only the first server has to create it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.server.client import PROMPT_TIMEOUT
from scripts.server.process import ComfyServer

from .rig import Bench, PromptDict, Run, assert_same, compile_model, with_model, without_decoder

pytestmark = pytest.mark.usefixtures("filled")

SIZES = [(128, 128), (136, 104), (72, 200)]
STEPS = 2

StartServer = Callable[..., ComfyServer]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store that all servers of this file share."""
    return tmp_path_factory.mktemp("restart") / "store"


@pytest.fixture(scope="module")
def start(make_server: Any, store: Path, tmp_path_factory: pytest.TempPathFactory) -> StartServer:
    """Start a new server with that store and an empty inductor cache."""

    def one(remember: bool = True, database: str = f"sqlite:///{store.parent / 'comfyui.db'}") -> ComfyServer:
        empty = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor"))}
        ours = {"RESOLUTE_STORE": str(store), "RESOLUTE_REMEMBER": "1" if remember else "0"}
        server: ComfyServer = make_server(environment={**empty, **ours}, arguments=["--database-url", database])
        return server

    return one


@pytest.fixture(scope="module")
def prompt(tiny_prompt: Any) -> Callable[..., PromptDict]:
    """The smallest model of a family, without a decoder: each server compiles or loads all its regions."""

    def make(width: int = 128, height: int = 128, kind: str = "sd") -> PromptDict:
        whole = tiny_prompt(width=width, height=height, kind=kind, steps=STEPS)
        if kind == "sd":
            whole["model"]["inputs"]["kind"] = "small"
        return without_decoder(whole)

    return make


def compiled(prompt: PromptDict) -> PromptDict:
    return with_model(prompt, compile_model())


def regions(run: Run) -> tuple[int, int]:
    """(compiled, loaded)"""
    return run.rise["region_compiles"], run.rise["region_loads"]


def tour(server: ComfyServer, prompt: Callable[..., PromptDict]) -> list[Run]:
    """Run each size with Resolute and compare its latents with ComfyUI's own."""
    bench, runs = Bench(server.client), []
    for size in SIZES:
        expected = bench.run(prompt(*size))
        runs.append(bench.run(compiled(prompt(*size))))
        assert_same(runs[-1], expected)
        assert runs[-1].rise["graph_calls"] == STEPS
        assert runs[-1].rise["compile_failures"] == runs[-1].rise["eager_calls"] == 0
    return runs


def stored(store: Path) -> int:
    """Number of complete artifacts."""
    return len(list(store.glob("*/*.region")))


@pytest.fixture(scope="module")
def filled(start: StartServer, store: Path, prompt: Callable[..., PromptDict]) -> SimpleNamespace:
    """The store after a server that was killed while it compiled, and one that compiled the rest."""
    killed = start()
    killed.client.queue(compiled(prompt()))
    deadline = time.monotonic() + PROMPT_TIMEOUT
    while stored(store) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert killed.process is not None
    killed.process.kill()  # while it compiles the third region
    killed.process.wait()
    kept = stored(store)

    server = start()
    runs = tour(server, prompt)
    total = server.client.get("/resolute/cache")["modules"][0]["regions"]
    server.stop()
    log = "\n".join(line for line in server.log().splitlines() if "Resolute" in line)
    return SimpleNamespace(kept=kept, runs=runs, total=total, log=log)


def test_a_server_killed_while_compiling_leaves_the_finished_regions(filled: SimpleNamespace, store: Path) -> None:
    first, *others = filled.runs
    assert filled.kept >= 2
    assert regions(first) == (filled.total - filled.kept, filled.kept), filled.log
    assert [regions(run) for run in others] == [(0, 0)] * len(others)
    assert stored(store) == filled.total


def test_the_next_server_preloads_the_used_regions(
    start: StartServer, store: Path, prompt: Callable[..., PromptDict]
) -> None:
    kept = stored(store)
    server = start()
    line = f"{kept} regions are there for {len(SIZES)} sizes of BASE, 0 compiles expected"
    deadline = time.monotonic() + PROMPT_TIMEOUT
    while line not in server.log() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert line in server.log()
    report = server.client.get("/resolute/cache")
    assert report["counters"]["region_loads"] == kept
    (model,) = report["models"]
    assert sorted(tuple(shape["latent_shape"][2:]) for shape in model["shapes"]) == sorted(
        (height // 8, width // 8) for width, height in SIZES
    )
    assert {shape["state"] for shape in model["shapes"]} == {"memory"}
    assert [regions(run) for run in tour(server, prompt)] == [(0, 0)] * len(SIZES)
    assert stored(store) == kept
    server.stop()


@pytest.mark.long
def test_without_remembered_shapes_regions_are_loaded_on_demand(
    start: StartServer, store: Path, prompt: Callable[..., PromptDict]
) -> None:
    kept = stored(store)
    server = start(remember=False)
    assert [regions(run) for run in tour(server, prompt)] == [(0, kept), (0, 0), (0, 0)]
    report = server.client.get("/resolute/cache")["store"]
    assert report["regions"] == kept
    assert 0 < report["bytes"] <= report["limit"]
    assert stored(store) == kept
    server.stop()


@pytest.mark.long
def test_only_a_damaged_region_is_compiled_again(
    start: StartServer, store: Path, prompt: Callable[..., PromptDict]
) -> None:
    kept = stored(store)
    region = next(iter(store.glob("*/*.region")))
    region.write_bytes(region.read_bytes()[:-7])
    server = start(remember=False)
    assert [regions(run) for run in tour(server, prompt)] == [(1, kept - 1), (0, 0), (0, 0)]
    assert f"{region.stem} is invalid (its name does not match its content" in server.log()
    assert stored(store) == kept
    server.stop()


@pytest.mark.long
def test_an_interrupted_write_is_never_loaded_as_a_region(
    start: StartServer, store: Path, prompt: Callable[..., PromptDict]
) -> None:
    """A region is written to a temporary file first; a kill may leave any part of it."""
    kept = stored(store)
    for number, path in enumerate(sorted(store.glob("*/*.region"))[:3]):
        content = path.read_bytes()
        path.unlink()
        Path(f"{path}.x{number}.tmp").write_bytes(content[: len(content) * number // 2])
    server = start(remember=False)
    assert [regions(run) for run in tour(server, prompt)] == [(3, kept - 3), (0, 0), (0, 0)]
    assert stored(store) == kept
    server.stop()


@pytest.mark.long
def test_two_concurrent_servers_compile_each_region_once(
    start: StartServer, store: Path, prompt: Callable[..., PromptDict]
) -> None:
    before = stored(store)
    servers = [start(remember=False, database="sqlite:///:memory:") for _ in range(2)]
    waiting = [server.client.queue(compiled(prompt(kind="sdxl"))) for server in servers]
    for server, prompt_id in zip(servers, waiting, strict=True):
        server.client.wait(prompt_id)
    counters = [Bench(server.client).counters() for server in servers]
    total = servers[0].client.get("/resolute/cache")["modules"][0]["regions"]
    new = stored(store) - before
    assert sum(each["region_compiles"] for each in counters) == new
    assert [each["region_compiles"] + each["region_loads"] for each in counters] == [total, total]
    assert all(each["region_calls"] > 0 for each in counters)
    for server in servers:
        server.stop()
