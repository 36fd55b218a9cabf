"""Private folders, files that only this user could have written, and atomic file writes."""

from __future__ import annotations

import contextlib
import functools
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

_warned: list[str] = []  # one warning per process


class NotPrivateError(OSError):
    """Another user of this machine may have written the files that code is loaded from."""


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents, each with mode 0700. Raises OSError.

    `Path.mkdir(parents=True)` would apply the mode to the last level only and the umask to the others.
    """
    missing = list(takewhile(lambda level: not level.is_dir(), (folder, *folder.parents)))
    for level in reversed(missing):
        level.mkdir(mode=0o700, exist_ok=True)


def why_not_private(folder: Path) -> str | None:
    """Return why another user of this machine may write to a folder or replace it by another one; None if nobody can.
    Raises OSError.

    Windows keeps permissions in access lists, which Python does not read. There only folders in the user's profile are
    known to be private, because its default lists exclude other users.
    """
    if sys.platform == "win32":
        inside = folder.resolve().is_relative_to(Path.home().resolve())
        return None if inside else f"{folder} is outside of your user profile"
    status = folder.stat()
    if status.st_uid != os.geteuid():
        return f"{folder} belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{folder} is writable by others"
    return next(filter(None, map(_why_exchangeable, _way_to(folder))), None)


def _way_to(folder: Path) -> list[Path]:
    """Return every folder and link on the path to `folder`, without `folder` itself."""
    way: dict[Path, None] = {}
    ends = [folder.absolute()]
    while ends:
        end = ends.pop()
        for place in (end, *end.parents):
            if place not in way and place.is_symlink():
                ends.append(place.parent / place.readlink())
            way[place] = None
    return [place for place in way if place.is_symlink() or not place.samefile(folder)]


def _why_exchangeable(place: Path) -> str | None:
    """Return why another user may rename a folder's entries or redirect a link, or None. In a folder with the sticky
    bit, such as the temporary one, only the owner of an entry may.
    """
    status, owners = place.stat(), {place.stat().st_uid, place.lstat().st_uid}
    if owners - _trusted_owners():
        return f"{place} belongs to another user"
    others = stat.S_IWOTH if status.st_gid in _own_groups() else stat.S_IWGRP | stat.S_IWOTH
    if status.st_mode & others and not status.st_mode & stat.S_ISVTX:
        return f"{place} is writable by others"
    return None


def _trusted_owners() -> set[int]:
    """Return this user and root; in a container, the machine's root has the number of the owner of "/"."""
    if sys.platform == "win32":  # files have no owner's number there
        return set()
    return {0, os.geteuid(), Path("/").stat().st_uid}


@functools.cache
def _own_groups() -> frozenset[int]:
    """Return groups without other users: root's, and one of this user's name, which the umask often lets write."""
    if sys.platform == "win32":
        return frozenset()
    import grp
    import pwd

    try:
        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(user.pw_gid)
    except KeyError:  # a container runs as a number without a name
        return frozenset({0})
    is_own = group.gr_name == user.pw_name and not set(group.gr_mem) - {user.pw_name}
    return frozenset({0, group.gr_gid} if is_own else {0})


def require_private(folder: Path) -> None:
    """Raise NotPrivateError if another user may write to the folder: that user could then run code as this one.

    On Windows this only warns, once: a portable ComfyUI is outside of the profile, but may be private.
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
def open_own(path: Path) -> Iterator[IO[bytes]]:
    """Open a regular file of this user, or of root, to read it. Raises NotPrivateError for any other, and OSError.

    Links and pipes are refused: a link may lead out of the private folder, and reading a pipe may never end. The file
    is checked again once it is open, because another file may have taken its name.
    """
    _require_own(path, path.lstat())
    flags = [getattr(os, name, 0) for name in ("O_RDONLY", "O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")]
    with open(os.open(path, sum(flags)), "rb") as stream:
        _require_own(path, os.fstat(stream.fileno()))
        yield stream


def _require_own(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise NotPrivateError(f"{path.name} is not a regular file")
    if sys.platform != "win32" and status.st_uid not in _trusted_owners():
        raise NotPrivateError(f"{path.name} belongs to another user")


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
    """Return the files that match a pattern, by name. A folder that cannot be read is logged and counts as empty."""
    try:
        return sorted(folder.glob(pattern))
    except OSError as error:
        logger.warning("Resolute: %s cannot be read (%s)", folder, error)
        return []
