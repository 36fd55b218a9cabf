"""A ComfyUI checkout at a pinned commit. Success is judged by the result: HEAD and main.py."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from ..errors import SetupError
from ..places import locked

URL = "https://github.com/comfyanonymous/ComfyUI.git"
TARGET = "0.33.0"
OLDEST = "0.8.0"
SPRING = "0.20.1"  # of April 2026, the last before core's functions for a block's paged weights
NEWEST = "2026-08-22"  # the day of the commit: it still calls itself 0.33.0
VERSIONS = {
    TARGET: "2f35f4a08176d993cded35dac3332be4f7287f41",
    OLDEST: "fc0cb10bcbee6e73ed3caf34c27f7bde4559a07f",
    SPRING: "64b8457f55cd7fb54ca7a956d9c73b505e903e0c",
    NEWEST: "783545f689a0af730065994b46b382ae24844c99",
}


def folder_for(root: Path, version: str = TARGET) -> Path:
    """The folder of the checkout of ``version``; ``COMFYUI_PATH`` overrides the target's."""
    override = os.environ.get("COMFYUI_PATH")
    if version == TARGET and override:
        return Path(override).expanduser().resolve()
    return root / (".comfyui" if version == TARGET else f".comfyui-{version}")


def ensure(root: Path, version: str = TARGET, say: Callable[[str], None] = print) -> Path:
    """The folder of a ComfyUI at the pinned commit, cloned if needed.

    A folder named by ``COMFYUI_PATH`` is used as it is and never changed.
    Raises SetupError if git or the network is missing.
    """
    folder = folder_for(root, version)
    if version == TARGET and os.environ.get("COMFYUI_PATH"):
        return _accept_given(folder, say)
    if is_ready(folder, version):
        return folder
    with locked(root / f"{folder.name}.lock", f"ComfyUI {version}"):
        if not is_ready(folder, version):
            _clone(folder, version, say)
    return folder


def is_ready(folder: Path, version: str) -> bool:
    """A checkout is complete if its HEAD is right, because git moves that last."""
    return (folder / "main.py").is_file() and head(folder) == VERSIONS[version]


def head(folder: Path) -> str | None:
    """The commit of the repository in ``folder``, or None; ignores a repository in a parent folder."""
    if not (folder / ".git").exists():
        return None
    done = _git(["rev-parse", "HEAD"], folder)
    return done.stdout.strip() if done.returncode == 0 else None


def _accept_given(folder: Path, say: Callable[[str], None]) -> Path:
    if not (folder / "main.py").is_file():
        raise SetupError(
            f"COMFYUI_PATH names {folder}, which is not a ComfyUI folder (no main.py). "
            "Set it to a ComfyUI folder, or unset it to get a fresh checkout."
        )
    if head(folder) not in VERSIONS.values():
        say(f"ComfyUI: using {folder}, which is not the pinned {TARGET}; results may differ.")
    return folder


def _clone(folder: Path, version: str, say: Callable[[str], None]) -> None:
    """Clone next to ``folder`` and rename at the end, so that an incomplete clone is never used."""
    if folder.is_symlink() or (folder.exists() and not (folder / ".git").exists()):
        raise SetupError(f"{folder} exists but this project did not make it. Move it away, or set COMFYUI_PATH to it.")
    say(f"ComfyUI: cloning {version} into {folder.name} (up to 200 MB, once).")
    partial = folder.with_name(folder.name + ".partial")
    _remove(partial)
    _must(["clone", "--quiet", "--no-checkout", URL, str(partial)], folder.parent)
    commit = VERSIONS[version]
    done = _git(["checkout", "--quiet", "--detach", commit], partial)
    if not is_ready(partial, version):
        raise SetupError(
            f"git could not check out ComfyUI {version} (commit {commit}): "
            f"{_last_line(done.stderr)} Check the network and the disk space, then run this again."
        )
    _remove(folder)
    partial.rename(folder)


def _remove(folder: Path) -> None:
    def make_writable(function: Callable[[str], object], path: str, _: object) -> None:
        Path(path).chmod(0o700)  # git's pack files are read-only, and Windows refuses to delete such files
        function(path)

    if folder.exists():
        shutil.rmtree(folder, onerror=make_writable)


def _git(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    # In a git hook or `git rebase --exec`, these variables would redirect our commands.
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        environment.pop(name, None)
    try:
        return subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        raise SetupError("git was not found. Install git, then run this again.") from None


def _must(arguments: list[str], folder: Path) -> None:
    done = _git(arguments, folder)
    if done.returncode != 0:
        raise SetupError(
            f"git {arguments[0]} failed: {_last_line(done.stderr)} "
            f"Check that {URL} can be reached (a proxy may need https_proxy), then run this again."
        )


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].rstrip(".") + "." if lines else "git said nothing."
