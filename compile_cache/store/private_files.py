"""Private folders and atomic file writes."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

_warned: list[str] = []  # once in a process


class NotPrivateError(OSError):
    """Another user of this machine may write to a folder that code is loaded from."""


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents, each with mode 0700. Raises OSError.

    `Path.mkdir(parents=True)` would apply the mode to the last level only and the umask to the others.
    """
    missing = list(takewhile(lambda level: not level.is_dir(), (folder, *folder.parents)))
    for level in reversed(missing):
        level.mkdir(mode=0o700, exist_ok=True)


def why_not_private(folder: Path) -> str | None:
    """Why another user of this machine may write to a folder, None if nobody can. Raises OSError.

    Windows keeps this in access lists, which Python does not read. There it is known only for folders in the user's
    profile, whose default lists leave other users out.
    """
    if sys.platform == "win32":
        inside = folder.resolve().is_relative_to(Path.home().resolve())
        return None if inside else f"{folder} is outside of your user profile"
    status = folder.stat()
    if status.st_uid != os.geteuid():
        return f"{folder} belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{folder} is writable by others"
    return None


def require_private(folder: Path) -> None:
    """Raise NotPrivateError if another user may write to the folder: that user could then run code as this one.

    On Windows this only warns, once: a portable ComfyUI is outside of the profile, and may be private.
    """
    why = why_not_private(folder)
    if why is not None and sys.platform != "win32":
        raise NotPrivateError(f"{why}, so no code is loaded from it: chmod 700 it, or set RESOLUTE_STORE")
    if why is not None:
        _warn_unchecked(why)


def _warn_unchecked(why: str) -> None:
    if _warned:
        return
    _warned.append(why)
    logger.warning(
        "Resolute: %s. Windows may let other users of this machine write there, and code from it runs as you. If "
        "others use this machine, set RESOLUTE_STORE to a folder in your profile.",
        why,
    )


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Write to a temporary file that replaces `path` at the end: even a power cut leaves the old file or the new one.

    Several threads and processes may write the same path: each has its own temporary file. Raises OSError.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        try_unlink(Path(temporary))
        raise


def write_file(path: Path, content: bytes) -> None:
    """Write a file with `atomic_write`. Raises OSError."""
    with atomic_write(path) as stream:
        stream.write(content)


def try_unlink(path: Path) -> None:
    """Remove a file; ignore OSError."""
    with contextlib.suppress(OSError):
        path.unlink()


def files_in(folder: Path, pattern: str) -> list[Path]:
    """The files of a pattern, by name. A folder that cannot be read is logged and counts as empty."""
    try:
        return sorted(folder.glob(pattern))
    except OSError as error:
        logger.warning("Resolute: %s cannot be read (%s)", folder, error)
        return []
