"""The smoke run: its servers, what does not fit or fails, and how it ends."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import smoke
from benchmarks.smoke_checks import FAIL, NOT_RUN, PASS
from benchmarks.smoke_rows import COLD, LORA, QUEUE, RESTART, SIZE, rows
from benchmarks.smoke_setup import commit_of, import_bundle
from scripts.places import ROOT
from scripts.server.process import ComfyServer
from scripts.setup.command import Setup

from .machine import Machine

Result = dict[str, Any]
FILES = {"checkpoint": "x.safetensors", "lora": "y.safetensors"}


def find(result: Result, kind: str) -> dict[str, Any]:
    return next(row for row in result["rows"] if row["kind"] == kind)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(each=0.5)
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
    assert [name for name, _ in machine.started] == ["cold", "restart", "stock"]
    store = str(tmp_path / "store")
    assert [variables["RESOLUTE_STORE"] for _, variables in machine.started] == [
        store,
        store,
        "0",
    ]  # nothing is loaded beside stock's prompts
    assert (result["left"], result["failed"], result["commit"]) == ([], {}, "abc")
    assert machine.asked == sorted(machine.asked)  # stock's come last
    sent = sum(len(row.counts) * (1 if row.kind == COLD else 2) for row in rows(False))
    assert len(machine.prompts) == sent - 1, "a server has one first prompt"
    queue, restart = find(result, QUEUE), find(result, RESTART)
    assert restart["stock"]["prompts"][0] == queue["stock"]["prompts"][0]
    assert queue["errors"] == {f"prompt {number}": 0.0 for number in range(1, 9)}
    widths = [nodes["latent"]["inputs"]["width"] for nodes in machine.prompts[:8]]
    assert widths == [1024] * 5 + [960] * 2 + [1024]
    assert find(result, SIZE)["errors"] == {"1": 0.0, "20": 0.0}
    assert {check["verdict"] for check in result["checks"]} == {PASS}
    assert code == 0


def test_what_cannot_fit_is_left_out_and_does_not_pass(machine: Machine, tmp_path: Path) -> None:
    code, result = start(tmp_path, seconds=130)
    assert code == 1
    assert [name for name, _ in machine.started] == ["cold", "restart", "stock"]
    assert any(name.startswith("stock: Flux") for name in result["left"])
    assert NOT_RUN in {check["verdict"] for check in result["checks"]}


@pytest.mark.parametrize(("left", "waited"), [(0, 15), (3, smoke.COMING)])
def test_the_first_server_ends_when_no_code_is_coming(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int, waited: float
) -> None:
    get = machine.get
    coming = {"coming": {"regions": left, "seconds": 9.0}} if left else {}
    monkeypatch.setattr(machine, "get", lambda path: get(path) | (coming if path == "/resolute/cache" else {}))
    _, result = start(tmp_path)
    assert result["servers"]["cold"]["waited_seconds"] == pytest.approx(waited, abs=1)
    assert "waited_seconds" not in result["servers"]["restart"]
    assert {variables["RESOLUTE_COMPILE"] for _, variables in machine.started} == {None}


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
