"""Fixtures for all tests: markers, ComfyUI checkouts, models, servers.

Nothing runs until a test requests it, so unit tests need no ComfyUI. If a checkout or
a server is not available, the test fails; it is not skipped.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from scripts import pack as packing
from scripts.models import generated
from scripts.places import ROOT, inductor_cache
from scripts.server.process import ComfyServer
from scripts.setup import comfyui

MARKERS = (
    "old: runs on the oldest supported ComfyUI",
    "long: takes minutes; run with scripts/test --long",
    "grid(count): only `count` of its cases, evenly spread, run without scripts/test --long",
)
# To find the CPU's vector instructions, inductor starts ten processes that import torch, in each process that compiles:
# 15 s of a processor. Only the demo's test lets it. Inductor reads this when it is imported.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Most tests count what the first call compiles, so it waits. Tests of compiles behind the picture ask for those.
os.environ.setdefault("RESOLUTE_COMPILE", "before")

hypothesis.settings.register_profile("no deadline", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("no deadline")

PACK_NAME = "resolute"
TEST_PACK_NAME = "resolute-test-pack"

MakeServer = Callable[..., ComfyServer]
MakeModel = Callable[[str], str]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options for the device and backend of the server tests, and for the record of `tests/comfy/matrix`."""
    group = parser.getgroup("resolute")
    group.addoption("--on-cuda", action="store_true", help="servers run on CUDA, on ComfyUI's default command line")
    group.addoption("--server-argument", action="append", default=[], help="one more argument for the shared server")
    group.addoption("--backend", default="inductor", help="what tests/comfy/matrix compiles with")
    group.addoption("--record", type=Path, help="a JSON file for the results of tests/comfy/matrix")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the other cases of a `grid` as long, before pytest leaves out what `-m` does not select."""
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("grid") is not None:
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in grids.values():
        marker = cases[0].get_closest_marker("grid")
        assert marker is not None
        kept = evenly_spread(len(cases), *marker.args)
        for number, case in enumerate(cases):
            if number not in kept:
                case.add_marker("long")


def evenly_spread(cases: int, count: int) -> set[int]:
    """Numbers of `count` of `cases` cases, the last among them; all if there are not more."""
    if cases <= count:
        return set(range(cases))
    return {cases - 1 - round(number * (cases - 1) / max(count - 1, 1)) for number in range(count)}


def server_environment() -> dict[str, str | None]:
    """One thread, and one inductor cache for all tests; tests of cold starts and restarts use their own.

    Resolute's store is off, because regions loaded from it would not count as compiled.
    """
    return {
        "RESOLUTE_STORE": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(inductor_cache())),
    }


def linked_packs() -> dict[str, Path]:
    """The test pack and Resolute itself."""
    packs = {TEST_PACK_NAME: ROOT / "tests" / "pack"}
    if (ROOT / "__init__.py").is_file():
        packs[PACK_NAME] = ROOT
    return packs


@pytest.fixture(scope="session", autouse=True)
def _torch_in_the_report(record_testsuite_property: Callable[[str, str], None]) -> None:
    """scripts/compatibility reads it from pytest's JUnit file."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # the fleet's environment has none
        record_testsuite_property("torch", importlib.metadata.version("torch"))


@pytest.fixture(autouse=True)
def _collector_as_before() -> Iterator[None]:
    """The pack has Python's collector look at all objects more rarely, which later tests of a process would inherit."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.fixture(scope="module")
def pack() -> Iterator[Callable[[str], Any]]:
    """`pack("nodes.adapters.warm_up.workflow")` imports a module of the pack without ComfyUI."""
    yield packing.module
    packing.forget()


@pytest.fixture(scope="session")
def comfyui_folder() -> Callable[[str], Path]:
    """``comfyui_folder("0.33.0")`` returns a checkout at the pinned commit."""
    return lambda version: comfyui.ensure(ROOT, version)


@pytest.fixture(scope="session")
def make_model(comfyui_folder: Callable[[str], Path]) -> MakeModel:
    """``make_model("sd15-mini")`` makes it if needed and returns the name for a loader node."""

    def make(kind: str) -> str:
        target = comfyui_folder(comfyui.TARGET)
        return generated.ensure(kind, Path(sys.executable), target).name

    return make


@pytest.fixture(scope="session")
def make_server(
    tmp_path_factory: pytest.TempPathFactory, comfyui_folder: Callable[[str], Path]
) -> Iterator[MakeServer]:
    """Starts servers that end with the session; call ``stop()`` to free memory earlier.

    ``environment`` is added to ``server_environment()``; a value of None removes a variable.
    """
    servers: list[ComfyServer] = []
    numbers = itertools.count()

    def make(
        version: str = comfyui.TARGET,
        *,
        environment: Mapping[str, str | None] | None = None,
        arguments: Sequence[str] = (),
        packs: Mapping[str, Path] | None = None,
        cpu: bool = True,
    ) -> ComfyServer:
        server = ComfyServer(
            Path(sys.executable),
            comfyui_folder(version),
            tmp_path_factory.mktemp(f"comfyui-{next(numbers)}"),
            packs=linked_packs() if packs is None else packs,
            models=generated.folder(),
            cpu=cpu,
            arguments=arguments,
            environment={**server_environment(), **(environment or {})},
        )
        server.start()
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.stop()
