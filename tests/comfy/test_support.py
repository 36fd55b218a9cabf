"""Setup recovers from interruptions, and its errors name the remedy. Needs no server and no network."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from compile_cache.backends.inductor.backend import NEWEST_TORCH, OLDEST_TORCH
from scripts import interpreter
from scripts.errors import SetupError
from scripts.models import generated
from scripts.places import ROOT, locked
from scripts.server.process import ComfyServer
from scripts.setup import comfyui, environment


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small repository instead of ComfyUI's; the pinned commit is not its newest."""
    source = tmp_path / "upstream"
    source.mkdir()
    git(source, "init", "--quiet")
    (source / "main.py").write_text("pinned")
    git(source, "add", ".")
    git(source, "commit", "--quiet", "-m", "pinned")
    pinned = git(source, "rev-parse", "HEAD").strip()
    (source / "main.py").write_text("newer")
    git(source, "commit", "--quiet", "-am", "newer")
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    monkeypatch.setattr(comfyui, "URL", str(source))
    monkeypatch.setitem(comfyui.VERSIONS, comfyui.TARGET, pinned)
    return source


@pytest.mark.usefixtures("upstream")
def test_comfyui_is_checked_out_at_the_pinned_commit(tmp_path: Path) -> None:
    assert (comfyui.ensure(tmp_path) / "main.py").read_text() == "pinned"


def test_a_second_checkout_needs_no_network(upstream: Path, tmp_path: Path) -> None:
    folder = comfyui.ensure(tmp_path)
    upstream.rename(tmp_path / "gone")
    assert comfyui.ensure(tmp_path) == folder


@pytest.mark.usefixtures("upstream")
def test_an_incomplete_clone_is_replaced(tmp_path: Path) -> None:
    for name in (".comfyui", ".comfyui.partial"):
        (tmp_path / name / ".git").mkdir(parents=True)
    assert (comfyui.ensure(tmp_path) / "main.py").read_text() == "pinned"
    assert not (tmp_path / ".comfyui.partial").exists()


@pytest.mark.usefixtures("upstream")
def test_a_folder_that_we_did_not_make_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".comfyui").mkdir()
    (tmp_path / ".comfyui" / "mine.txt").write_text("keep")
    with pytest.raises(SetupError, match="Move it away"):
        comfyui.ensure(tmp_path)
    assert (tmp_path / ".comfyui" / "mine.txt").read_text() == "keep"


def test_an_unreachable_comfyui_names_the_address(upstream: Path, tmp_path: Path) -> None:
    upstream.rename(tmp_path / "gone")
    with pytest.raises(SetupError, match="can be reached"):
        comfyui.ensure(tmp_path)


@pytest.mark.usefixtures("upstream")
def test_a_missing_git_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match="Install git"):
        comfyui.ensure(tmp_path)


def test_a_comfyui_path_without_comfyui_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    with pytest.raises(SetupError, match=r"no main\.py"):
        comfyui.ensure(ROOT)


def test_the_environment_key_depends_on_python_and_the_requirements(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_bytes(b"numpy\ntorch\n")
    key = environment.environment_key((3, 11), [file])
    file.write_bytes(b"numpy\r\ntorch\r\n")
    assert environment.environment_key((3, 11), [file]) == key
    assert environment.environment_key((3, 12), [file]) != key
    file.write_bytes(b"numpy\n")
    assert environment.environment_key((3, 11), [file]) != key


@pytest.mark.parametrize("version", [(3, 9), (3, 14)])
def test_an_unsupported_python_names_the_supported_versions(version: tuple[int, int]) -> None:
    with pytest.raises(SetupError, match=r"3\.10 to 3\.13"):
        environment.check_python(version)


START_AS_PYTHON_3_9 = """
import runpy, sys
sys.version_info = (3, 9, 18)
sys.argv = [sys.argv[1], "--help"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("command", ["test", "demo"])
def test_a_command_started_with_an_old_python_says_so_in_one_sentence(command: str) -> None:
    arguments = [sys.executable, "-c", START_AS_PYTHON_3_9, str(ROOT / "scripts" / command)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "3.10 to 3.13" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("pin", "version"),
    [(environment.OLDEST_TORCH_PIN, OLDEST_TORCH), (environment.NEWEST_TORCH_PIN, NEWEST_TORCH)],
)
def test_the_pinned_torch_is_the_one_that_the_backend_names(pin: str, version: tuple[int, int]) -> None:
    pinned = tuple(map(int, environment.pinned_torch(ROOT, pin).split(".")))
    assert len(pinned) == 3
    assert pinned[: len(version)] == version


def test_a_given_python_with_another_torch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin = tmp_path / environment.OLDEST_TORCH_PIN
    pin.parent.mkdir()
    pin.write_text("# the oldest\ntorch==1.0.0\n")
    monkeypatch.setenv("RESOLUTE_PYTHON", sys.executable)
    with pytest.raises(SetupError, match=r"does not have torch 1\.0\.0"):
        environment.ensure_torch(tmp_path, environment.OLDEST_TORCH_PIN)


def test_an_environment_without_its_final_stamp_is_not_ready(tmp_path: Path) -> None:
    stamp = tmp_path / environment.STAMP
    assert not environment.is_ready(tmp_path, "key")
    interpreter.python_of(tmp_path).parent.mkdir()
    interpreter.python_of(tmp_path).symlink_to(sys.executable)
    stamp.write_text("building key\n")
    assert not environment.is_ready(tmp_path, "key")
    stamp.write_text("ready key\n")
    assert environment.is_ready(tmp_path, "key")
    assert not environment.is_ready(tmp_path, "other")


HOLD_A_LOCK = """
import sys, time
from pathlib import Path
from scripts.places import locked
with locked(Path(sys.argv[1]), "a test"):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_lock_is_exclusive_and_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLD_A_LOCK, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with (
            pytest.raises(SetupError, match="busy with a test"),
            locked(path, "a test", timeout=0.1),
        ):
            pass
        holder.kill()
    with locked(path, "a test", timeout=5):
        pass


def test_an_unknown_model_names_the_choices(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="sd15-mini, "):
        generated.ensure("sd9", Path(sys.executable), tmp_path)


def test_on_cuda_no_flag_changes_how_comfyui_computes(tmp_path: Path) -> None:
    server = ComfyServer(Path(sys.executable), tmp_path, tmp_path, models=tmp_path, cpu=False)
    flags = {part for part in server.command() if part.startswith("--")}
    addresses = {"--listen", "--port", "--base-directory", "--database-url"}
    assert flags == addresses | {"--extra-model-paths-config"}


def test_the_newest_comfyui_runs_in_the_environment_of_the_target(comfyui_folder: Callable[[str], Path]) -> None:
    # Server tests need no front end; a difference in anything else would want an environment of its own.
    front_end = {"comfyui-frontend-package", "comfyui-workflow-templates", "comfyui-embedded-docs"}
    target, newest = (
        set((comfyui_folder(version) / "requirements.txt").read_text("utf-8").split("\n"))
        for version in (comfyui.TARGET, comfyui.NEWEST)
    )
    assert {line.partition("==")[0] for line in target ^ newest} <= front_end
