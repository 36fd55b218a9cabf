"""Temporary folders that the next start removes if this process is killed.

    TEMPORARY/resolute-<random>/owner.lock    locked while the process that made the folder lives

The operating system releases the lock however a process ends. So an unlocked marker means a dead owner, even if its
process number was reused, or is meaningless here because the folder comes from another container.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import BaseFileLock

logger = logging.getLogger(__name__)

PREFIX = "resolute-"
MARKER = "owner.lock"
# The errors of filelock on a file system without locks.
_NO_LOCKS = (OSError, NotImplementedError)


class TemporaryFolder:
    """A private folder (0700) in a temporary directory of the system, until `remove` or the end of the process.

    On a file system without locks the folder of a killed process stays, because nothing shows whether its owner lives.
    """

    def __init__(self) -> None:
        """Raises OSError if no folder can be made."""
        self._owner = os.getpid()
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_directory()))
            try:
                self._lock = _lock(self.path)
            except _NO_LOCKS as error:
                logger.debug("Resolute: no lock in %s: %s", self.path, error)
                self._lock = None
                return
            # Another start may have taken the marker between its creation and our lock; then it removes the folder.
            if self._lock is not None and (self.path / MARKER).exists():
                return

    def remove(self) -> None:
        """Remove the folder with everything in it, as far as possible. May be called again.

        In a process that was forked from the owner it does nothing, because the owner still uses the folder.
        """
        if os.getpid() != self._owner:
            return
        if self._lock is not None:
            self._lock.release()  # Windows removes no file that is open
        shutil.rmtree(self.path, ignore_errors=True)


def remove_abandoned() -> int:
    """Remove the folders whose processes have ended, and return their number. Keeps links, folders of other users, and
    folders without a marker.
    """
    removed = 0
    for path in _directory().glob(f"{PREFIX}*"):
        if not _is_ours(path):
            continue
        with contextlib.suppress(*_NO_LOCKS):
            lock = _lock(path)
            if lock is not None:
                lock.release()
                shutil.rmtree(path, ignore_errors=True)
                removed += not path.exists()
    if removed:
        logger.info("Resolute: removed %d temporary folders of processes that were killed", removed)
    return removed


def _directory() -> Path:
    """Return the usual temporary directory. If its name contains a space, which breaks inductor's commands for the C++
    compiler, return another one of the system, if there is one.
    """
    usual = tempfile.gettempdir()
    others = () if os.name == "nt" else ("/tmp", "/var/tmp")  # noqa: S108 (the folder in it is private)  # nosec
    found = [each for each in others if os.access(each, os.W_OK)] if any(map(str.isspace, usual)) else []
    return Path(found[0] if found else usual)


def _is_ours(path: Path) -> bool:
    """True for a folder of this user with a marker in it."""
    try:
        folder, marker = path.lstat(), (path / MARKER).lstat()
    except OSError:
        return False
    if not (stat.S_ISDIR(folder.st_mode) and stat.S_ISREG(marker.st_mode)):
        return False
    return not hasattr(os, "geteuid") or folder.st_uid == os.geteuid()


def _lock(folder: Path) -> BaseFileLock | None:
    """Acquire and return the lock of a folder's marker; None if another process has it. Raises errors of _NO_LOCKS."""
    import filelock  # a dependency of torch; inspecting a bundle needs neither

    lock = filelock.FileLock(folder / MARKER, thread_local=False)  # another thread may release it
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return None
    return lock
