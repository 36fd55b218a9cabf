"""The registry's archive in a ComfyUI with nothing else: its nodes, pages, workflows and commands work from there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.models import generated
from scripts.server.process import ComfyServer
from scripts.setup import comfyui

from ..archive import shipped, unpack
from ..conftest import server_environment
from .rig import Bench, PromptDict
from .test_old import NODES

pytestmark = pytest.mark.long  # it compiles everything anew in an empty home: minutes

STEPS = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ComfyUI's folder, with the archive unpacked in custom_nodes."""
    folder = tmp_path_factory.mktemp("installed")
    unpack(folder / "custom_nodes" / "resolute")
    return folder


@pytest.fixture(scope="module")
def installed(folder: Path, comfyui_folder: Callable[[str], Path]) -> Iterator[ComfyServer]:
    """A server with an empty home and Resolute's defaults; inductor's cache is shared, to save time."""
    home = folder / "home"
    home.mkdir()
    own = {"RESOLUTE_STORE": None, "HOME": str(home), "USERPROFILE": str(home)}
    environment = {**server_environment(), **own}
    target = comfyui_folder(comfyui.TARGET)
    with ComfyServer(
        Path(sys.executable), target, folder, models=generated.folder(), environment=environment
    ) as server:
        yield server


@pytest.fixture(scope="module")
def workflow(folder: Path, make_model: Callable[[str], str]) -> Path:
    """The bundled text to image, saved by a user with a model of theirs and a small size."""
    prompt: PromptDict = json.loads(
        (folder / "custom_nodes" / "resolute" / "workflows" / "api" / "sd15_text_to_image.json").read_text("utf-8")
    )
    values = {
        "CheckpointLoaderSimple": {"ckpt_name": make_model("sd15-mini")},
        "ResoluteResolution": {"preset": "custom", "width": 64, "height": 72},
        "KSampler": {"steps": STEPS},
    }
    for part in prompt.values():
        part["inputs"].update(values.get(part["class_type"], {}))
    file = folder / "workflow.json"
    file.write_text(json.dumps(prompt), "utf-8")
    return file


def command(server: ComfyServer, folder: Path, name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A command as docs/servers.md says: with the Python that runs ComfyUI, from the pack's folder."""
    return subprocess.run(
        [str(server.python), f"scripts/{name}", *map(str, arguments)],
        cwd=folder / "custom_nodes" / "resolute",
        env=server._environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_node_its_help_and_its_workflows_are_there(installed: ComfyServer, folder: Path) -> None:
    client = installed.client
    known: dict[str, Any] = client.get("/object_info")
    assert {name: known[name]["display_name"] for name in NODES if name in known} == NODES
    assert "IMPORT FAILED" not in installed.log()
    for name in NODES:
        assert client.raw(f"/extensions/resolute/docs/{name}.md").decode().startswith(f"# {NODES[name]}")
    listed = client.get("/api/workflow_templates")["resolute"]
    assert sorted(listed) == sorted(file.stem for file in (folder / "custom_nodes/resolute/workflows").glob("*.json"))


def test_a_bundled_workflow_runs_and_the_commands_work(installed: ComfyServer, folder: Path, workflow: Path) -> None:
    bench = Bench(installed.client)
    run = bench.run(json.loads(workflow.read_text("utf-8")))
    assert [image.shape for image in run.images] == [(72, 64, 3)]
    assert run.forwards == STEPS + 1
    assert (run.rise["compile_failures"], run.bypasses) == (0, {})

    warmed = command(installed, folder, "warm-up", workflow, "--server", installed.url)
    assert (warmed.returncode, warmed.stderr) == (0, "")
    assert "ready" in warmed.stdout

    place = ("--comfyui", installed.comfyui, "--", "--cpu", "--base-directory", folder)
    exported = command(installed, folder, "bundle", "export", folder / "regions.bundle", *place)
    assert exported.returncode == 0, exported.stderr
    regions = run.rise["region_compiles"]
    assert exported.stdout.startswith(f"{regions} regions (")
    shown = command(installed, folder, "bundle", "show", folder / "regions.bundle")
    assert (shown.returncode, shown.stderr) == (0, "")
    imported = command(installed, folder, "bundle", "import", folder / "regions.bundle", "--yes", *place)
    assert imported.returncode == 0, imported.stderr


def test_nothing_is_written_into_the_packs_folder(installed: ComfyServer, folder: Path) -> None:
    pack = folder / "custom_nodes" / "resolute"
    there = {path.relative_to(pack).as_posix() for path in pack.rglob("*") if path.is_file()}
    assert {path for path in there - shipped() if "__pycache__" not in path} == set()
