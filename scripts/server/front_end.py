"""ComfyUI's front end is a package of its own, and without it ComfyUI ends when it starts. Prompts need none."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

_PACKAGE = "comfyui_frontend_package"
_PAGE = (
    "<!doctype html><title>ComfyUI</title><p>This ComfyUI answers requests, and has no front end: its Python lacks "
    "comfyui-frontend-package. Install ComfyUI's requirements there."
)


def arguments(python: Path, folder: Path, given: Sequence[str] = (), python_path: str = "") -> list[str]:
    """ComfyUI's arguments for a front end of one page, made in `folder`, where its Python has none.

    given: its other arguments; one that names a front end is left alone. python_path: its PYTHONPATH.
    """
    if any(argument.partition("=")[0].startswith("--front-end") for argument in given):
        return []
    if _has_package(python, python_path):
        return []
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index.html").write_text(_PAGE, "utf-8")
    return ["--front-end-root", str(folder)]


@functools.cache
def _has_package(python: Path, python_path: str) -> bool:
    """True also where the interpreter cannot be asked: then ComfyUI's own start says why."""
    code = f"import importlib.util, sys; sys.exit(3 if importlib.util.find_spec({_PACKAGE!r}) is None else 0)"
    try:
        environment = {**os.environ, "PYTHONPATH": python_path}
        done = subprocess.run([str(python), "-c", code], env=environment, capture_output=True, check=False)
    except OSError:
        return True
    return done.returncode != 3
