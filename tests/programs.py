"""Other processes of tests and a wait for them, commands as modules, and how many functions of Python a call calls."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from scripts.places import ROOT


def run_python(code: str, *arguments: object, folder: Path = ROOT, given: str = "", **variables: str) -> str:
    """What a new interpreter prints that imports this checkout. given: its input. It must end well, in ten minutes."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        cwd=folder,
        input=given,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_command(name: str, *arguments: object, given: str = "", options: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """Run a command of `scripts/`. Returns its exit code, output and errors. options: of the interpreter."""
    command = [sys.executable, *options, str(ROOT / "scripts" / name), *map(str, arguments)]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def command_module(path: str) -> ModuleType:
    """A command as a module, not yet in `sys.modules`; it needs a loader, because its name has no .py."""
    loader = SourceFileLoader(path.replace("/", "_"), str(ROOT / path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def python_calls(call: Callable[[], object]) -> int:
    """How many functions of Python it calls."""
    count = 0

    def counted(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(counted)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def wait_for(condition: Callable[[], bool], seconds: float = 600.0) -> None:
    """Wait until it holds. Fails where it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
