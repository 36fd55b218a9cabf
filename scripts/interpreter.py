"""Finds ComfyUI and the Python that runs it, so that a command works without arguments. Standard library only."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .places import ROOT


def comfyui_folder() -> Path | None:
    """ComfyUI's folder: ``COMFYUI_PATH``, the ComfyUI in which this pack is installed, or a clone's own checkout."""
    given = os.environ.get("COMFYUI_PATH")
    known = [Path(given).expanduser()] if given else [*_installed_in(), ROOT / ".comfyui"]
    return next((folder for folder in known if (folder / "main.py").is_file()), None)


def rerun_with(module: str, comfyui: Path | None) -> None:
    """If this Python lacks `module`, rerun the command with one that has it, and exit with its code. Else return."""
    if importlib.util.find_spec(module) is not None:
        return
    python = next((each for each in candidates(comfyui) if each.is_file() and _has(each, module)), None)
    if python is not None:
        sys.exit(subprocess.call([str(python), *sys.argv]))


def python_of(folder: Path) -> Path:
    """The interpreter inside a virtual environment."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def candidates(comfyui: Path | None) -> Iterator[Path]:
    """Interpreters that may run ComfyUI, the likeliest first; they need not exist."""
    if given := os.environ.get("RESOLUTE_PYTHON"):
        yield Path(given).expanduser()
    for folder in ([comfyui] if comfyui else []) + _installed_in():
        yield from (python_of(folder / ".venv"), python_of(folder / "venv"))
        yield folder.parent / "python_embeded" / "python.exe"  # in the portable build for Windows
    yield python_of(ROOT / ".venv")  # in a clone, created by `scripts/test`


def _installed_in() -> list[Path]:
    return [ROOT.parents[1]] if ROOT.parent.name == "custom_nodes" else []


def _has(python: Path, module: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([str(python), "-c", code], capture_output=True, check=False).returncode == 0
    except OSError:
        return False
