"""Folders outside the checkout, and a lock against two processes doing the same work.

Environments and models take gigabytes, so all checkouts of a user share them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from .errors import SetupError

ROOT = Path(__file__).resolve().parents[1]


def cache_root() -> Path:
    """``~/.cache/resolute``, or the folder in ``RESOLUTE_CACHE_HOME``."""
    override = os.environ.get("RESOLUTE_CACHE_HOME")
    return Path(override).expanduser() if override else Path.home() / ".cache" / "resolute"


def environments_root() -> Path:
    """Folder of the virtual environments; ``RESOLUTE_ENVIRONMENTS`` overrides it."""
    override = os.environ.get("RESOLUTE_ENVIRONMENTS")
    return Path(override).expanduser() if override else cache_root() / "environments"


def models_root() -> Path:
    """Folder of generated models, in the layout of ComfyUI's ``models``."""
    return cache_root() / "models"


def inductor_cache() -> Path:
    """Inductor's disk cache, shared by all tests so that few of them compile cold."""
    return cache_root() / "inductor"


@contextlib.contextmanager
def locked(path: Path, what: str, timeout: float = 3600.0) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; the system releases it if the process dies.

    what: names the work in messages. Raises SetupError after ``timeout`` seconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as handle:
        deadline = time.monotonic() + timeout
        announced = False
        while not _try_lock(handle.fileno()):
            if not announced:
                print(f"Waiting: another process is busy with {what}.", flush=True)
                announced = True
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
