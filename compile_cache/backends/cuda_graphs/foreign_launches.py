"""Triton kernels of other packages in a capture, which Triton's launcher cannot launch with cudaMallocAsync.

The launcher asks the driver about each tensor's pointer, and the driver has no answer for memory that is allocated
inside a capture. Our own kernels get addresses (`KernelByAddress`), those of SageAttention get tensors. ComfyUI's
attention catches the launcher's error and takes torch's attention, which was not rehearsed. With SageAttention 1.0.6,
torch 2.11 and an H100 that broke the capture, and the process ended. So the launch is refused before the driver is
asked, by an error that nothing catches on its way.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...torch_facts import private_names
from .memory import is_trimmable

_this = threading.local()


class TensorLaunchError(BaseException):
    """Not an Exception: ComfyUI and other packs catch those around their kernels, and go on with another one."""


@contextlib.contextmanager
def refused_launches() -> Iterator[None]:
    """Within, Triton's launcher raises TensorLaunchError in this thread for a kernel that gets tensors; but not with
    torch's own allocator, whose memory the driver knows. Raises it at the end if a bare `except` caught it.
    """
    _this.refuses, _this.refused = is_trimmable(), ""
    if _this.refuses and "triton" in sys.modules:  # what the call launches it has launched before
        _guard(private_names.CudaLauncher)
    try:
        yield
    finally:
        _this.refuses = False
    if _this.refused:
        raise TensorLaunchError(_this.refused)


@functools.cache
def _guard(launcher: type[Callable[..., None]] | None) -> None:
    """Once, for good: if two threads put something in its place and back, one may put back what the other had put."""
    if launcher is None:
        return
    launch = launcher.__call__

    @functools.wraps(launch)
    def guarded(self: Any, *args: Any) -> None:
        if getattr(_this, "refuses", False) and _has_tensor(args):
            why = "launches a Triton kernel, which fails in a capture with cudaMallocAsync"
            _this.refused = f"{_caller()} {why}"
            raise TensorLaunchError(_this.refused)
        launch(self, *args)

    launcher.__call__ = guarded  # type: ignore[method-assign]


def _has_tensor(args: tuple[Any, ...]) -> bool:
    """True if there is one among a kernel's arguments. A TensorDescriptor has its tensor as `base`."""
    return any(
        _has_tensor(each) if isinstance(each, tuple) else isinstance(getattr(each, "base", each), torch.Tensor)
        for each in args
    )


def _caller() -> str:
    """The name of the module that called Triton."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "triton":
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))
