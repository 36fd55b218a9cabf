"""`scripts/bundle` between two servers: the command finds the environment and the store of a real server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.places import ROOT
from scripts.server.process import ComfyServer

from .rig import Bench, assert_same, compile_model, with_model

# Each server stores its regions in the default place, below its own folders.
OWN_STORE = {"RESOLUTE_STORE": None}


def bundle(server: ComfyServer, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command for a server that was started with `--cpu --base-directory FOLDER`."""
    typed = [*map(str, arguments), "--comfyui", str(server.comfyui), "--", "--cpu", "--base-directory"]
    environment = {name: value for name, value in server._environment().items() if name != "RESOLUTE_STORE"}
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bundle"), *typed, str(server.folder)],
        env=environment,
        cwd=os.sep,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.long
def test_another_server_loads_what_one_server_compiled(make_server: Any, tiny_prompt: Any, tmp_path: Path) -> None:
    prompt = tiny_prompt(width=128, height=96, steps=2)
    compiled = with_model(prompt, compile_model())
    file = tmp_path / "regions.bundle"

    def start(name: str) -> ComfyServer:
        empty = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / name)}
        server: ComfyServer = make_server(environment={**OWN_STORE, **empty})
        return server

    one = start("one")
    nothing = bundle(one, "export", file)
    assert nothing.returncode == 1
    assert "has nothing for this machine's environment" in nothing.stderr
    bench = Bench(one.client)
    expected = bench.run(prompt)
    regions = bench.run(compiled).rise["region_compiles"]
    assert regions > 5
    exported = bundle(one, "export", file)
    assert exported.returncode == 0, exported.stderr
    assert exported.stdout.startswith(f"{regions} regions (")
    one.stop()

    two = start("two")
    imported = bundle(two, "import", file, "--yes")
    assert imported.returncode == 0, imported.stderr
    assert f"{regions} regions (" in imported.stdout
    run = Bench(two.client).run(compiled)
    assert (run.rise["region_compiles"], run.rise["region_loads"]) == (0, regions)
    assert run.rise["graph_calls"] == 2
    assert_same(run, expected)
    two.stop()
