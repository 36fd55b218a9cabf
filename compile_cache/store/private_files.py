"""Private folders and atomic file writes."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import IO


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents, each with mode 0700. Raises OSError.

    `Path.mkdir(parents=True)` would apply the mode to the last level only and the umask to the others.
    """
    missing = list(takewhile(lambda level: not level.is_dir(), (folder, *folder.parents)))
    for level in reversed(missing):
        level.mkdir(mode=0o700, exist_ok=True)


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
