"""The virtual environments: for tests and demo, for the oldest and the newest torch, for OneFlow, and for Ray.

They live outside the checkout, named by Python version and a hash of the requirement files,
so that a second checkout does not install 6 GB again. ``.venv`` links to the first one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import SetupError
from ..interpreter import python_of
from ..places import environments_root, locked

OLDEST_PYTHON = (3, 10)
NEWEST_PYTHON = (3, 13)
REQUIREMENTS = ("requirements.txt", "requirements/test.txt", "requirements/dev.txt")
OLDEST_TORCH_PIN = "requirements/oldest-torch.txt"
NEWEST_TORCH_PIN = "requirements/newest-torch.txt"
ONEFLOW_PYTHON = (3, 10)
ONEFLOW_REQUIREMENTS = (*REQUIREMENTS, "requirements/oneflow.txt")
FLEET_REQUIREMENTS = ("requirements/fleet.txt", "requirements/dev.txt")
STAMP = "resolute-environment.txt"

Say = Callable[[str], None]


def ensure(root: Path, comfyui: Path, say: Say = print) -> Path:
    """The Python of an environment with everything installed, made if needed.

    ``RESOLUTE_PYTHON`` names a ready interpreter instead, for machines without a network;
    nothing is installed then. Raises SetupError with the remedy.
    """
    if given := _given():
        return given
    check_python(sys.version_info[:2])
    files = [root / name for name in REQUIREMENTS] + [comfyui / "requirements.txt"]
    python = _named(files, say)
    _link(root / ".venv", python.parent.parent)
    return python


def ensure_torch(root: Path, pin: str, say: Say = print) -> Path:
    """The Python of an environment with the torch that the requirement file `pin` names, without ComfyUI.

    pin: OLDEST_TORCH_PIN or NEWEST_TORCH_PIN. ``RESOLUTE_PYTHON`` is used instead if it has that torch. Raises
    SetupError otherwise.
    """
    if given := _given():
        version = pinned_torch(root, pin)
        code = f"import torch, sys; sys.exit(torch.__version__.split('+')[0] != {version!r})"
        return _require(given, f"torch {version}", code)
    check_python(sys.version_info[:2])
    files = [root / name for name in ("requirements.txt", pin, "requirements/dev.txt")]
    return _named(files, say)


def ensure_oneflow(root: Path, comfyui: Path, say: Say = print) -> Path:
    """The Python 3.10 of an environment with ComfyUI's requirements, OneFlow and onediff (about 11 GB).

    ``RESOLUTE_PYTHON`` is used instead if it has OneFlow. Raises SetupError with the remedy.
    """
    if given := _given():
        return _require(
            given, "OneFlow (requirements/oneflow.txt)", "from importlib.metadata import version as v; v('oneflow')"
        )
    base = find_oneflow_python()
    if base is None:
        raise SetupError(
            "OneFlow's newest public version has builds only up to Python 3.10, and no Python 3.10 was found. "
            "Install one (`pyenv install 3.10`, or your system's python3.10), then run this again."
        )
    files = [root / name for name in ONEFLOW_REQUIREMENTS] + [comfyui / "requirements.txt"]
    return _named(files, say, ONEFLOW_PYTHON, base)


def ensure_fleet(root: Path, say: Say = print) -> Path:
    """The Python of an environment with Ray Serve and pytest, without torch (about 0.8 GB). Raises SetupError."""
    check_python(sys.version_info[:2])
    files = [root / name for name in FLEET_REQUIREMENTS]
    return _named(files, say)


def find_oneflow_python() -> Path | None:
    """A Python 3.10 that can make virtual environments (this one, one on PATH or one of pyenv), or None."""
    named = [sys.executable, shutil.which("python3.10")]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    known = [Path(path) for path in named if path] + sorted(pyenv.glob("3.10.*/bin/python3.10"), reverse=True)
    check = f"import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != {ONEFLOW_PYTHON})"
    return next((python for python in known if _succeeds(python, check)), None)


def pinned_torch(root: Path, pin: str) -> str:
    """The torch version that a requirement file pins, such as "2.8.0"."""
    found = re.search(r"^torch==(\S+)$", (root / pin).read_text("utf-8"), re.MULTILINE)
    if found is None:
        raise SetupError(f"{pin} does not pin torch. Restore it with `git checkout`.")
    return found[1]


def check_python(version: tuple[int, int]) -> None:
    """Raise SetupError for a Python version without builds of the pinned torch."""
    if not OLDEST_PYTHON <= version <= NEWEST_PYTHON:
        raise SetupError(
            f"Python {version[0]}.{version[1]} cannot run this: it needs Python 3.10 to 3.13. "
            "Start the command with one of those, for example `python3.11 scripts/test`."
        )


def environment_key(version: tuple[int, int], files: Sequence[Path]) -> str:
    """``<X.Y>-<hash>``: Python version and hash of the requirement files; line endings do not count."""
    digest = hashlib.sha256()
    for file in files:
        if not file.is_file():
            raise SetupError(f"{file} is missing. Restore it with `git checkout`.")
        digest.update(b"\n".join(file.read_bytes().splitlines()) + b"\0")
    return f"{version[0]}.{version[1]}-{digest.hexdigest()[:12]}"


def is_ready(folder: Path, key: str) -> bool:
    """An environment is ready if it is complete for ``key`` and its base Python still exists."""
    if _stamp_of(folder) != f"ready {key}":
        return False
    return _succeeds(python_of(folder), "")


def has_cuda(python: Path) -> bool:
    """Ask torch in that environment for an NVIDIA GPU, in a short process."""
    return _succeeds(python, "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 3)")


def _succeeds(python: Path, code: str) -> bool:
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0


def _given() -> Path | None:
    """The interpreter that RESOLUTE_PYTHON names, or None. Raises SetupError if it has no torch."""
    given = os.environ.get("RESOLUTE_PYTHON")
    return _require(Path(given).expanduser(), "torch (ComfyUI's requirements)", "import torch") if given else None


def _require(python: Path, what: str, code: str) -> Path:
    """The interpreter that RESOLUTE_PYTHON names, if this code runs there. Raises SetupError."""
    if _succeeds(python, code):
        return python
    raise SetupError(
        f"RESOLUTE_PYTHON names {python}, which cannot be started or does not have {what}. Name one that has it, or "
        "unset it to get a new environment."
    )


def _named(
    files: Sequence[Path], say: Say, version: tuple[int, int] = sys.version_info[:2], base: Path = Path(sys.executable)
) -> Path:
    key = environment_key(version, files)
    return _built(environments_root() / key, key, files, say, base)


def _built(folder: Path, key: str, files: Sequence[Path], say: Say, base: Path = Path(sys.executable)) -> Path:
    """The interpreter of the environment in ``folder``; builds it with the Python `base` if it is not ready."""
    if not is_ready(folder, key):
        with locked(folder.with_name(folder.name + ".lock"), "the virtual environment"):
            if not is_ready(folder, key):
                _build(folder, key, files, say, base)
    return python_of(folder)


def _link(link: Path, folder: Path) -> None:
    """Link ``.venv`` to the environment, where the file system supports links.

    A real ``.venv`` is left alone; the environment works without the link.
    """
    if link.exists() and not link.is_symlink():
        return
    with contextlib.suppress(OSError, NotImplementedError):  # also if another process was faster
        if not link.is_symlink() or Path(os.readlink(link)) != folder:
            link.unlink(missing_ok=True)
            link.symlink_to(folder, target_is_directory=True)


def _stamp_of(folder: Path) -> str | None:
    try:
        return (folder / STAMP).read_text("utf-8").strip()
    except OSError:
        return None


def _build(folder: Path, key: str, files: Sequence[Path], say: Say, base: Path) -> None:
    """Build in place, because an environment cannot be renamed; the stamp becomes "ready" last."""
    if folder.exists():
        if _stamp_of(folder) is None and any(folder.iterdir()):
            raise SetupError(f"{folder} exists but this project did not make it. Move it away.")
        say("Environment: removing an incomplete or outdated one.")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / STAMP).write_text(f"building {key}\n", "utf-8")
    names = {file.name for file in files}
    size = 11 if ONEFLOW_REQUIREMENTS[-1] in names else 1 if FLEET_REQUIREMENTS[0] in names else 6
    say(f"Environment: making {folder} (about {size} GB, a few minutes, once).")
    _make_venv(folder, base)
    _install(python_of(folder), files)
    (folder / STAMP).write_text(f"ready {key}\n", "utf-8")


def _make_venv(folder: Path, base: Path) -> None:
    command = [str(base), "-m", "venv", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SetupError(
            f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()[-400:]}\n"
            f"Python's venv module is incomplete. On Debian or Ubuntu: `sudo apt install "
            f"python3.{sys.version_info[1]}-venv`; elsewhere use a Python from python.org."
        )


def _install(python: Path, files: Sequence[Path]) -> None:
    command = [str(python), "-m", "pip", "install", "--no-input", "--progress-bar", "off"]
    command += ["--disable-pip-version-check"]
    for file in files:
        command += ["-r", str(file)]
    # What pip prints goes to stderr: on stdout, `scripts.setup.command` prints the interpreter alone.
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise SetupError(
            "pip could not install the requirements; its last lines say why. Check the network (a proxy may need "
            "https_proxy) and that about 15 GB of disk are free, then run this again."
        )
