"""Temporary folders: those of processes that are gone go, and nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from compile_cache.store import temporary_folders
from compile_cache.store.temporary_folders import MARKER, TemporaryFolder, remove_abandoned
from scripts.places import ROOT

from ...programs import run_python

OWNER = """
import sys
from compile_cache.store.temporary_folders import TemporaryFolder
folder = TemporaryFolder()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory for each test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.setenv(name, str(tmp_path))
    return tmp_path


# Another pack forks, and its process ends as Python ends.
FORKING_OWNER = """
import atexit, os
from compile_cache.store.temporary_folders import TemporaryFolder, remove_abandoned
folder = TemporaryFolder()
atexit.register(folder.remove)
child = os.fork()
if child:
    os.waitpid(child, 0)
    print(folder.path.is_dir(), remove_abandoned(), flush=True)
"""


def start_owner() -> tuple[subprocess.Popen[str], Path]:
    """Another process that holds a folder, and the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    (folder / "library.so").write_bytes(b"code")
    return process, folder


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_the_folder_of_a_killed_process_goes_at_the_next_start() -> None:
    process, folder = start_owner()
    assert remove_abandoned() == 0
    assert (folder / "library.so").exists()
    kill(process)
    assert remove_abandoned() == 1
    assert not folder.exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_that_ends_leaves_the_folder_to_its_owner(place: Path) -> None:
    assert run_python(FORKING_OWNER) == "True 0\n"
    assert list(place.iterdir()) == []


def test_the_process_number_of_a_dead_owner_may_belong_to_another_process() -> None:
    """Nothing is read from the marker, so a number in it means nothing."""
    process, folder = start_owner()
    kill(process)
    (folder / MARKER).write_text(str(os.getpid()))
    assert remove_abandoned() == 1


def test_a_folder_of_this_process_stays_until_it_is_removed(place: Path) -> None:
    folder = TemporaryFolder()
    assert folder.path.parent == place
    assert remove_abandoned() == 0
    assert folder.path.stat().st_mode & 0o777 == 0o700 or sys.platform == "win32"
    folder.remove()
    folder.remove()
    assert list(place.iterdir()) == []


def test_what_has_no_marker_stays(place: Path) -> None:
    (place / "resolute-results").mkdir()
    (place / "resolute-notes.txt").write_text("not ours")
    assert remove_abandoned() == 0
    assert len(list(place.iterdir())) == 2


@pytest.mark.skipif(sys.platform == "win32", reason="a temporary directory on Windows is one user's")
def test_the_folder_of_another_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    process, folder = start_owner()
    kill(process)
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    assert remove_abandoned() == 0
    assert folder.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="links take a privilege on Windows")
def test_a_link_to_a_folder_is_not_followed(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / MARKER).touch()
    (place / "resolute-link").symlink_to(other)
    linked = place / "resolute-marker"
    linked.mkdir()
    (linked / MARKER).symlink_to(other / MARKER)
    assert remove_abandoned() == 0
    assert (other / MARKER).exists()


def test_a_folder_that_another_start_takes_before_it_is_locked_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    real, taken = temporary_folders._lock, []

    def lock(folder: Path) -> object:
        if not taken:
            taken.append(folder)
            other = real(folder)
            assert other is not None
            remove_later = real(folder)
            other.release()
            return remove_later
        return real(folder)

    monkeypatch.setattr(temporary_folders, "_lock", lock)
    assert TemporaryFolder().path != taken[0]


def test_a_file_system_without_locks_costs_no_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise NotImplementedError("no locks here")

    monkeypatch.setattr(temporary_folders, "_lock", refuse)
    folder = TemporaryFolder()
    (folder.path / MARKER).touch()
    assert remove_abandoned() == 0
    folder.remove()
    assert not folder.path.exists()


@pytest.mark.skipif(os.name == "nt", reason="other temporary directories are known on POSIX only")
def test_a_directory_with_a_space_in_its_name_is_left_for_another_one(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaced = place / "my temporary"
    spaced.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(spaced))
    folder = TemporaryFolder()
    try:
        assert not any(map(str.isspace, str(folder.path)))
        assert folder.path.is_dir()
    finally:
        folder.remove()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert temporary_folders._directory() == spaced
