"""Temporary folders that the next start removes if this process is killed.

    TEMPORARY/resolute-<random>/owner.lock    locked while the process that made the folder lives

The operating system releases the lock however a process ends. So an unlocked marker means a dead owner, also where its
process number was given to another process, or means nothing here because the folder comes from another container.
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
# What filelock raises on a file system without locks.
_NO_LOCKS = (OSError, NotImplementedError)


class TemporaryFolder:
    """A private folder (0700) in the system's temporary directory, until `remove` or the end of the process.

    On a file system without locks the folder of a killed process stays, because nothing shows whether its owner lives.
    """

    def __init__(self) -> None:
        """Raises OSError where no folder can be made."""
        self._owner = os.getpid()
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
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
        """Remove the folder with everything in it, as far as that can be. May be called again.

        In a process that was forked from the owner it does nothing, because the owner still uses the folder.
        """
        if os.getpid() != self._owner:
            return
        if self._lock is not None:
            self._lock.release()  # Windows removes no file that is open
        shutil.rmtree(self.path, ignore_errors=True)


def remove_abandoned() -> int:
    """Remove the folders whose processes are gone, and return how many. Leaves links, folders of other users, and
    folders without a marker.
    """
    removed = 0
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
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


def _is_ours(path: Path) -> bool:
    """True if it is a folder of this user with a marker in it."""
    try:
        folder, marker = path.lstat(), (path / MARKER).lstat()
    except OSError:
        return False
    if not (stat.S_ISDIR(folder.st_mode) and stat.S_ISREG(marker.st_mode)):
        return False
    return not hasattr(os, "geteuid") or folder.st_uid == os.geteuid()


def _lock(folder: Path) -> BaseFileLock | None:
    """The lock of its marker; None where another process holds it. Raises what _NO_LOCKS names."""
    import filelock  # comes with torch; a bundle can be looked at without either

    lock = filelock.FileLock(folder / MARKER, thread_local=False)  # another thread may release it
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return None
    return lock
