"""Folders outside the checkout, and a lock for work that two processes may start.

Environments and models are gigabytes; they live once per user and are shared by
every checkout.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from .errors import SetupError

ROOT = Path(__file__).resolve().parents[2]


def cache_root() -> Path:
    """``~/.cache/resolute``, or what ``RESOLUTE_CACHE_HOME`` says."""
    override = os.environ.get("RESOLUTE_CACHE_HOME")
    return Path(override).expanduser() if override else Path.home() / ".cache" / "resolute"


def environments_root() -> Path:
    """Where virtual environments live; ``RESOLUTE_ENVIRONMENTS`` overrides it."""
    override = os.environ.get("RESOLUTE_ENVIRONMENTS")
    return Path(override).expanduser() if override else cache_root() / "environments"


def models_root() -> Path:
    """Where generated models live, in the folder layout of ComfyUI's ``models``."""
    return cache_root() / "models"


def inductor_cache() -> Path:
    """Inductor's disk cache, shared by the tests so that few of them compile cold."""
    return cache_root() / "inductor"


@contextlib.contextmanager
def locked(path: Path, what: str, timeout: float = 3600.0) -> Iterator[None]:
    """Holds an exclusive lock on ``path``; the system releases it if the process dies.

    ``what`` is named while waiting for another process, and when ``timeout`` passes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as handle:
        deadline = time.monotonic() + timeout
        said = False
        while not _try_lock(handle.fileno()):
            if not said:
                print(f"Waiting: another process is busy with {what}.", flush=True)
                said = True
            if time.monotonic() > deadline:
                raise SetupError(
                    f"Another process has held {path} for {timeout:.0f} s while busy with {what}. "
                    "End that process, then run this again."
                )
            time.sleep(0.5)
        try:
            yield
        finally:
            _unlock(handle.fileno())


def _try_lock(descriptor: int) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(descriptor, 0, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _unlock(descriptor: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, 0, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_UN)
