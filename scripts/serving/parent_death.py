"""Ends a child process when its parent dies, on Linux."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def end_with_parent(libraries: Sequence[str] = ("libc.so.6", "libc.musl-x86_64.so.1")) -> None:
    """In the child: have Linux kill it when its parent dies, so that no ComfyUI keeps a GPU that nobody uses.

    For `preexec_fn` of subprocess.
    """
    if sys.platform != "linux":
        return
    for name in libraries:
        try:
            ctypes.CDLL(name).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            return
        except OSError:
            continue
