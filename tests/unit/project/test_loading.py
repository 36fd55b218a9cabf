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
# ComfyUI's table of nodes, as it is after the first copy was loaded; then one more copy is loaded.
TWICE = """
from types import SimpleNamespace
first, how = module, sys.argv[2]
class CompileModel: pass
CompileModel.__module__ = name + ".nodes.compile_model"
sys.modules["nodes"] = SimpleNamespace(NODE_CLASS_MAPPINGS={"ResoluteCompileModel": CompileModel})
if how == "removed":
    del sys.modules[name]
if how == "older":
    del first.other_copies
folder = folder if how == "again" else sys.argv[3]
name = folder.replace(".", "_x_")
spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py")
module = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(json.dumps({
    "works": not hasattr(module, "NODE_CLASS_MAPPINGS") and module.WEB_DIRECTORY == "./web",
    "does nothing": getattr(module, "NODE_CLASS_MAPPINGS", None) == {} and not hasattr(module, "WEB_DIRECTORY"),
    "told": getattr(first, "other_copies", None),
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


def load(folder: Path, then: str, *arguments: str, path: str = "") -> dict[str, Any]:
    """Load a folder in a fresh interpreter outside our tree, and return the JSON that `then` prints."""
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", LOAD + then, str(folder), *arguments]
    done = subprocess.run(command, cwd=folder.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return {**result, "log": done.stderr}


def test_the_root_loads_by_path_without_comfyui_and_without_torch(installed: Path) -> None:
    report = load(installed, REPORT)
    assert report["coroutine"] and (ROOT / report["web"]).is_dir()
    assert report["heavy"] == []


def test_submodules_are_found_inside_the_folder_and_not_as_top_level_modules(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "nodes.py").write_text("DECOY = True\n", encoding="utf-8")
    report = load(installed, SUBMODULES, path=str(tmp_path))
    assert report["decoy"]
    for key in ("nodes", "core", "core_through_keys"):
        assert Path(report[key]).is_relative_to(installed), key
    assert report["shadowed"] == []


@pytest.mark.parametrize("how", ["newer", "older"])
def test_a_second_copy_does_nothing_and_says_so(installed: Path, how: str) -> None:
    """An older first copy cannot be told; the log has the line in any case. Both copies may link to one folder."""
    other = installed.with_name("ComfyUI-Resolute")
    other.symlink_to(installed, target_is_directory=True)
    report = load(installed, TWICE, how, str(other))
    assert report["does nothing"]
    assert f"The copy in {installed} runs, the one in {other} does nothing." in report["log"]
    assert report["told"] == ([str(other)] if how == "newer" else None)


@pytest.mark.parametrize("how", ["again", "removed"])
def test_a_copy_that_is_loaded_again_or_in_place_of_a_removed_one_works(installed: Path, how: str) -> None:
    other = installed.with_name("ComfyUI-Resolute")
    other.symlink_to(installed, target_is_directory=True)
    report = load(installed, TWICE, how, str(other))
    assert (report["works"], report["told"], report["log"]) == (True, [], "")
