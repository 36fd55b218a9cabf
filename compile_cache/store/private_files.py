"""Folders that are this user's alone, and files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import IO


def make_private(folder: Path) -> None:
    """Make a folder and what is missing above it, with 0700 at every level. Raises OSError.

    With `parents`, `mkdir` gives its mode to the last level only: the umask decides on the others.
    """
    missing = list(takewhile(lambda level: not level.is_dir(), (folder, *folder.parents)))
    for level in reversed(missing):
        level.mkdir(mode=0o700, exist_ok=True)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `path` at the end: all of it or nothing, also when the power goes.

    Raises OSError. Any number of threads and processes may write one path: each has a file of its own until then.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        unlink(Path(temporary))
        raise


def write(path: Path, content: bytes) -> None:
    """See `replacing`."""
    with replacing(path) as stream:
        stream.write(content)


def unlink(path: Path) -> None:
    """Remove a file, if that can be."""
    with contextlib.suppress(OSError):
        path.unlink()
