"""Find code that waits for the GPU, without turning its waits into errors.

`torch.cuda.set_sync_debug_mode` applies to the whole process. With "error", an `.item()` in another thread (a second
GPU's worker, another pack) raises there. With "warn", it runs and warns, and the handler of the warning runs in the
thread that waits.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import torch

_TRIES = 3  # attempts at a run during which another thread changed Python's warnings
_SYNCHRONIZES = "synchronizing CUDA operation"  # in the text of torch's warning
_DISTURBED = "an unknown place, because another thread changed Python's warnings meanwhile"


class _Recorder:
    """Replaces `warnings.showwarning`: records the waits of its own thread, and forwards all other warnings.

    `warnings.catch_warnings` of another thread may reinstall it after `remove`. Then it forwards every warning.
    """

    def __init__(self, found: list[str]) -> None:
        self._own, self._found = threading.get_ident(), found
        self._show = warnings.showwarning
        self.active = True

    def __call__(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> Any:
        if not self.active or _SYNCHRONIZES not in str(message):
            self._show(message, category, filename, lineno, file, line)
        elif threading.get_ident() == self._own:
            self._found.append(f"{filename}:{lineno}")

    def remove(self) -> None:
        self.active = False
        if warnings.showwarning is self:
            warnings.showwarning = self._show


@contextlib.contextmanager
def recorded_waits() -> Iterator[list[str]]:
    """Yields a list that receives "file:line" of each operation of this thread that waits for the GPU.

    Other threads' warnings are shown as usual, except for their waits: nobody asked to be warned of those. If another
    thread changes the handler or filters of warnings meanwhile, waits may be missed; then the list gets an extra entry.

    `warnings.catch_warnings` is not safe here: if two threads use it at once, the one that exits last restores the
    other one's handler for good.
    """
    found = list[str]()
    mode = torch.cuda.get_sync_debug_mode()
    recorder = warnings.showwarning = _Recorder(found)
    warnings.filterwarnings("always", message=f".*{_SYNCHRONIZES}")
    filters, own = warnings.filters, warnings.filters[0]
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield found
    finally:
        torch.cuda.set_sync_debug_mode(mode)
        if warnings.showwarning is not recorder or warnings.filters is not filters or own not in filters:
            found.append(_DISTURBED)
        recorder.remove()
        for each in (filters, warnings.filters):  # another thread's copy may have it too
            with contextlib.suppress(ValueError):
                each.remove(own)  # type: ignore[attr-defined]


def waits_of(run: Callable[[], object]) -> list[str]:
    """The places where `run` waits for the GPU, as "file:line". Repeats a run during which another thread changed
    Python's warnings: a thread that compiles does so when it imports and traces.
    """
    for _ in range(_TRIES):
        with recorded_waits() as waits:
            run()
        if _DISTURBED not in waits:
            break
    return waits
