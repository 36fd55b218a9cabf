"""Makes the n-th file operation below a folder fail, or kills the process there."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

# Python's audit events of file operations, with the place of the path among their arguments.
_EVENTS = {"open": 0, "os.rename": 0, "os.remove": 0, "os.utime": 0, "os.mkdir": 0, "os.scandir": 0, "os.listdir": 0}
_active: list[FileOperations] = []
_hooked = False


class FileOperations:
    """Counts the file operations below a folder, and does something at the n-th."""

    def __init__(self, folder: Path, number: int, action: Callable[[str], None]) -> None:
        self.folder = str(folder)
        self.number = number
        self.count = 0
        self._action = action

    @property
    def reached(self) -> bool:
        """Whether there were that many."""
        return self.count >= self.number

    def happens(self, what: str) -> None:
        self.count += 1
        if self.count == self.number:
            self._action(what)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Meanwhile the operations of this process count."""
        global _hooked
        if not _hooked:  # a hook stays for good
            sys.addaudithook(_hook)
            _hooked = True
        fsync = os.fsync

        def synchronize(handle: int) -> None:
            self.happens("fsync")
            fsync(handle)

        _active.append(self)
        try:
            with mock.patch.object(os, "fsync", synchronize):
                yield
        finally:
            _active.clear()


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _active or event not in _EVENTS:
        return
    path = arguments[_EVENTS[event]]
    if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(_active[0].folder):
        _active[0].happens(f"{event} {path}")


def failing(folder: Path, number: int, code: int) -> FileOperations:
    """The n-th operation raises the OSError of an errno."""

    def fail(what: str) -> None:
        raise OSError(code, os.strerror(code), what)

    return FileOperations(folder, number, fail)


def killed_in_a_child(folder: Path, number: int, work: Callable[[], None]) -> bool:
    """Do the work in a copy of this process, which is killed at the n-th operation. Returns whether it was killed."""

    def kill(what: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            with FileOperations(folder, number, kill).watched():
                work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])
