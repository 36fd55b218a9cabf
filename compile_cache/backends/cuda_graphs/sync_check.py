"""Find code that waits for the GPU, without turning its waits into errors.

`torch.cuda.set_sync_debug_mode` holds for the whole process. With "error", an `.item()` in another thread (a second
GPU's worker, another pack) raises there. With "warn", it runs and warns, and a warning names the thread that it
comes from.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

import torch

_SYNCHRONIZES = "synchronizing CUDA operation"  # in the text of torch's warning


@contextlib.contextmanager
def recorded_waits() -> Iterator[list[str]]:
    """Yields a list that gets "file:line" of each operation of this thread that waits for the GPU.

    What other threads warn of goes its usual way, but for such waits: nobody asked to be warned of those.
    """
    own, found = threading.get_ident(), list[str]()
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def record(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> Any:
            if _SYNCHRONIZES not in str(message):
                show(message, category, filename, lineno, file, line)
            elif threading.get_ident() == own:
                found.append(f"{filename}:{lineno}")

        warnings.filterwarnings("always", message=f".*{_SYNCHRONIZES}")
        warnings.showwarning = record
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)
