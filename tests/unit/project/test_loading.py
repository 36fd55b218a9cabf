"""ComfyUI loads packs by path, under a module name that is a path. That must work, also without ComfyUI or torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ("__init__.py", "compile_cache", "nodes")

# As `load_custom_node` in ComfyUI's nodes.py does it: the module's name is the folder's path, without dots.
LOAD = """
import importlib, importlib.util, inspect, json, sys
folder = sys.argv[1]
name = folder.replace(".", "_x_")
spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py")
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)
"""
REPORT = """
print(json.dumps({
    "coroutine": inspect.iscoroutinefunction(module.comfy_entrypoint),
    "web": module.WEB_DIRECTORY,
    "heavy": sorted(sys.modules.keys() & {"torch", "numpy", "comfy", "comfy_api", "nodes", "server", "folder_paths"}),
}))
"""
SUBMODULES = """
import nodes
print(json.dumps({
    "decoy": nodes.DECOY,
    "nodes": importlib.import_module(name + ".nodes").__file__,
    "core": importlib.import_module(name + ".compile_cache.store.fingerprint").__file__,
    "core_through_keys": sys.modules[name + ".compile_cache.keys"].__file__,
    "shadowed": sorted(key for key in sys.modules if key.partition(".")[0] == "compile_cache"),
}))
"""


@pytest.fixture(params=["my resolute-pack 1", "resolute.v1.2", "Resolute"])
def installed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The package in a folder whose name has a space, a hyphen or dots, as users have."""
    folder = tmp_path / "custom_nodes" / request.param
    folder.mkdir(parents=True)
    for name in PACKAGE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def load(folder: Path, then: str, path: str = "") -> dict[str, Any]:
    """Load a folder in a fresh interpreter outside our tree, and return the JSON that `then` prints."""
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", LOAD + then, str(folder)]
    done = subprocess.run(command, cwd=folder.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_the_root_loads_by_path_without_comfyui_and_without_torch(installed: Path) -> None:
    report = load(installed, REPORT)
    assert report["coroutine"]
    assert report["heavy"] == []


def test_submodules_are_found_inside_the_folder_and_not_as_top_level_modules(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "nodes.py").write_text("DECOY = True\n", encoding="utf-8")
    report = load(installed, SUBMODULES, path=str(tmp_path))
    assert report["decoy"]
    for key in ("nodes", "core", "core_through_keys"):
        assert Path(report[key]).is_relative_to(installed), key
    assert report["shadowed"] == []


def test_the_web_folder_that_the_root_names_exists() -> None:
    report = load(ROOT, REPORT)
    assert (ROOT / report["web"]).is_dir()
