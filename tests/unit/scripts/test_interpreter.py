"""A command that is started by its name alone finds ComfyUI and the Python that runs it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import interpreter

MISSING = "no_such_module_of_comfyui"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """ComfyUI's folder, with this pack in custom_nodes."""
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    monkeypatch.delenv("RESOLUTE_PYTHON", raising=False)
    monkeypatch.setattr(interpreter, "ROOT", tmp_path / "ComfyUI" / "custom_nodes" / "resolute")
    return there(tmp_path / "ComfyUI" / "main.py").parent


def there(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    return file


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[[set[Path], Path | None], list[str] | None]:
    """The command that is run where these interpreters have the module; None if this one goes on."""

    def start(have: set[Path], comfyui: Path | None) -> list[str] | None:
        runs: list[list[str]] = []
        monkeypatch.setattr(interpreter, "_has", lambda python, module: python in have and module == MISSING)
        monkeypatch.setattr(subprocess, "call", lambda command: runs.append(command) or 3)
        monkeypatch.setattr("sys.argv", ["scripts/bundle", "export", "a file"])
        try:
            interpreter.rerun_with(MISSING, comfyui)
        except SystemExit as end:
            assert end.code == 3
            return runs[0]
        return None

    return start


@pytest.mark.parametrize("where", [".venv", "venv", "portable", "of the clone"])
def test_it_goes_on_with_the_python_of_comfyui(installed: Path, started: Callable[..., object], where: str) -> None:
    folders = {".venv": installed / ".venv", "venv": installed / "venv", "of the clone": interpreter.ROOT / ".venv"}
    portable = installed.parent / "python_embeded" / "python.exe"
    python = there(portable if where == "portable" else interpreter.python_of(folders[where]))
    assert started({python}, installed) == [str(python), "scripts/bundle", "export", "a file"]
    assert started(set(), installed) is None  # there, without the module


def test_the_folder_that_was_named_comes_before_the_one_it_is_installed_in(
    installed: Path, tmp_path: Path, started: Callable[..., object]
) -> None:
    pythons = {there(interpreter.python_of(folder / "venv")) for folder in (installed, tmp_path / "named")}
    assert started(pythons, tmp_path / "named") == [
        str(interpreter.python_of(tmp_path / "named" / "venv")), "scripts/bundle", "export", "a file"
    ]  # fmt: skip


def test_a_python_that_has_the_module_is_kept(started: Callable[..., object]) -> None:
    interpreter.rerun_with("json", None)


def test_comfyui_is_where_it_is_installed_or_in_the_clone(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert interpreter.comfyui_folder() == installed
    monkeypatch.setattr(interpreter, "ROOT", tmp_path / "clone")
    assert interpreter.comfyui_folder() is None
    checkout = there(tmp_path / "clone" / ".comfyui" / "main.py").parent
    assert interpreter.comfyui_folder() == checkout
    monkeypatch.setenv("COMFYUI_PATH", str(installed))
    assert interpreter.comfyui_folder() == installed


def test_an_interpreter_is_asked_for_the_module(tmp_path: Path) -> None:
    assert interpreter._has(Path(sys.executable), "json")
    assert not interpreter._has(Path(sys.executable), MISSING)
    assert not interpreter._has(tmp_path, "json")
