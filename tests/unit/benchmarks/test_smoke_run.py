"""The smoke run: its servers, what does not fit or fails, and how it ends."""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from benchmarks import smoke
from benchmarks.smoke_checks import FAIL, NOT_RUN, PASS
from benchmarks.smoke_rows import COLD, LORA, SIZE, rows
from benchmarks.smoke_setup import commit_of, import_bundle
from scripts.errors import PromptError
from scripts.places import ROOT
from scripts.server.process import ComfyServer
from scripts.setup.command import Setup

Result = dict[str, Any]
FILES = {"checkpoint": "x.safetensors", "lora": "y.safetensors"}


def find(result: Result, kind: str) -> dict[str, Any]:
    return next(row for row in result["rows"] if row["kind"] == kind)


class Machine:
    """Servers whose clock only prompts move: each forward of our nodes is a replay, and takes a quarter of stock's."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.stores: list[str] = []
        self.prompts: list[dict[str, Any]] = []
        self.fails = ""  # a node type whose prompts fail
        self.clock = 100.0
        counted = dict.fromkeys(
            ("region_compiles", "captures", "graph_calls", "replays", "eager_calls", "stall_seconds"), 0
        )
        self.counted: dict[str, Any] = {**counted, "bypasses": {}}

    @contextlib.contextmanager
    def server(self, setup: Any, folder: Path, arguments: list[str], **settings: Any) -> Iterator[Any]:
        self.started.append(folder.name)
        self.stores.append(settings["environment"]["RESOLUTE_STORE"])
        log = argparse.Namespace(poll=lambda: None, pid=os.getpid())
        yield argparse.Namespace(client=self, process=log, log=lambda: "Device: a GPU\nother")

    def monotonic(self) -> float:
        return self.clock

    def sleep(self, seconds: float) -> None:
        self.clock += seconds

    def get(self, path: str) -> Any:
        return {"counters": copy.deepcopy(self.counted)} if path == "/resolute/cache" else {"events": []}

    def run(self, nodes: dict[str, Any], timeout: float) -> Any:
        kinds = [node["class_type"] for node in nodes.values()]
        if self.fails in kinds:
            raise PromptError(f"{self.fails} failed")
        self.prompts.append(nodes)
        steps = nodes["sample"]["inputs"]["steps"] if "sample" in nodes else 0
        forwards = steps + kinds.count("VAEDecode")
        if is_ours := any(kind.startswith("ResoluteCompile") for kind in kinds):
            self.counted["replays"] += forwards
        seconds = 0.5 + forwards * (0.05 if is_ours else 0.2)
        self.clock += seconds
        stamps = {"execution_start": 0, "execution_success": 1000 * seconds}
        return {"status": {"messages": [(name, {"timestamp": at}) for name, at in stamps.items()]}, "nodes": nodes}

    def outputs(self, history: Any, key: str) -> list[Any]:
        return [1] if "latents" in history["nodes"] else []

    def images(self, history: Any, key: str) -> list[bytes]:
        file = io.BytesIO()
        numpy.save(file, numpy.ones(3) + history["nodes"]["sample"]["inputs"]["seed"])
        return [file.getvalue()]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(smoke.rig, "server", machine.server)
    monkeypatch.setattr(smoke.rig, "environment", lambda server: {"date": "2026-11-25T10", "gpu": "a GPU"})
    monkeypatch.setattr(smoke, "time", machine)
    monkeypatch.setattr(smoke, "make_models", lambda *given: FILES)
    monkeypatch.setattr(smoke.command, "prepare", lambda: Setup(Path(sys.executable), {"0.33.0": ROOT}))
    monkeypatch.setattr(smoke.Smoke, "_give_back", lambda *given: {"after_unload_gib": 0.5})
    return machine


def start(folder: Path, seconds: float = 1000.0) -> tuple[int, Result]:
    out = folder / "out.json"
    options = argparse.Namespace(
        out=out, seconds=seconds, folder=None, models=None, argument=[], cpu=False, bundle=folder / "none", commit="abc"
    )
    code = smoke.run(options, folder)
    return code, json.loads(out.read_text("utf-8"))


def test_a_whole_run_measures_ours_first_and_names_its_commit(machine: Machine, tmp_path: Path) -> None:
    code, result = start(tmp_path)
    assert machine.started == ["cold", "restart", "stock"]
    store = str(tmp_path / "store")
    assert machine.stores == [store, store, "0"]  # nothing is loaded beside stock's prompts
    assert (result["left"], result["failed"], result["commit"]) == ([], {}, "abc")
    is_stock = ["ResoluteCompile" not in str(nodes) for nodes in machine.prompts]
    assert is_stock == sorted(is_stock)
    assert len(machine.prompts) == sum(len(row.counts) * (1 if row.kind == COLD else 2) for row in rows(False))
    assert find(result, SIZE)["errors"] == {"1": 0.0, "20": 0.0}
    assert {check["verdict"] for check in result["checks"]} == {PASS}
    assert code == 0


def test_what_cannot_fit_is_left_out_and_does_not_pass(machine: Machine, tmp_path: Path) -> None:
    code, result = start(tmp_path, seconds=80)
    assert code == 1
    assert machine.started == ["cold", "restart", "stock"]
    assert any(name.startswith("stock: Flux") for name in result["left"])
    assert NOT_RUN in {check["verdict"] for check in result["checks"]}


def test_a_prompt_that_fails_leaves_the_other_rows(machine: Machine, tmp_path: Path) -> None:
    machine.fails = "LoraLoaderModelOnly"
    code, result = start(tmp_path)
    assert code == 1
    assert len(result["failed"]) == 2
    assert {check["row"] for check in result["checks"] if check["verdict"] == FAIL} == {find(result, LORA)["row"]}


def test_a_server_that_does_not_start_fails(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **settings: Any) -> Any:
        raise smoke.ServerError("ComfyUI ended with code 1")

    monkeypatch.setattr(smoke.rig, "server", refuse)
    code, result = start(tmp_path)
    assert code == 1
    assert set(result["failed"]) == {"cold", "restart", "stock"}
    assert {check["verdict"] for check in result["checks"]} == {NOT_RUN}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM")
def test_a_run_that_is_ended_ends_its_server(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from benchmarks import smoke
from scripts.server.process import ComfyServer
class Stub(ComfyServer):
    def command(self): return [sys.executable, "-c", "import time; time.sleep(600)"]
    def _wait_until_ready(self):
        (Path({str(tmp_path)!r}) / "child").write_text(str(self.process.pid))
        super()._wait_until_ready()
smoke.make_models = lambda *given: {{}}
smoke.command.prepare = lambda: smoke.command.Setup(Path(sys.executable), {{"0.33.0": Path.cwd()}})
smoke.rig.server = lambda setup, folder, arguments, **settings: Stub(setup.python, Path.cwd(), folder)
sys.argv = ["smoke", "--cpu", "--out", {str(tmp_path / "out.json")!r}, "--folder", {str(tmp_path / "work")!r}]
sys.exit(smoke.main())
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    child, deadline = tmp_path / "child", time.monotonic() + 120
    while not (child.exists() and child.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(child.read_text()), 0)
    found = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert {check["verdict"] for check in found["checks"]} == {NOT_RUN}


def test_a_file_that_is_no_bundle_leaves_the_run_cold(tmp_path: Path) -> None:
    file = tmp_path / "regions.bundle"
    file.write_bytes(b"no zip")
    found = import_bundle(file, ComfyServer(Path(sys.executable), ROOT, tmp_path / "server"), tmp_path / "store")
    assert (found["imported"], found["imported_bytes"]) == (False, 6)
    assert "bundle" in found["said"]
    assert not (tmp_path / "store").exists()


# --- what the file names --------------------------------------------------------------------------------------------


def test_the_commit_is_gits_or_the_callers_or_unknown(tmp_path: Path) -> None:
    assert commit_of(tmp_path, None) == {"commit": "unknown", "is_dirty": None}
    assert commit_of(tmp_path, "abc") == {"commit": "abc", "is_dirty": None}
    names = ["-c", "user.name=x", "-c", "user.email=x@x"]
    for words in (["init", "-q"], [*names, "commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    found = commit_of(tmp_path, None)
    assert (len(found["commit"]), found["is_dirty"]) == (40, False)
    (tmp_path / "new").touch()
    assert commit_of(tmp_path, None) == {"commit": found["commit"], "is_dirty": True}
    (tmp_path / "folder").mkdir()
    assert commit_of(tmp_path / "folder", None)["commit"] == "unknown"  # the repository is that of its parent
