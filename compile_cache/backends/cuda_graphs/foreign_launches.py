"""Launch other packages' Triton kernels by address inside a capture.

Triton's launcher asks the driver about each tensor's pointer, and the driver has no answer for memory that
cudaMallocAsync, ComfyUI's default, allocates inside a capture. Packages catch that error and fall back to other code,
which was not rehearsed: with SageAttention 1.0.6, torch 2.11 and an H100 that broke the capture, and the process ended.
So we pass addresses to the launcher, for which it makes no query, as for our own kernels (`KernelByAddress`). We refuse
a launch whose arguments cannot be replaced so, with an error that no `except Exception` catches.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ...torch_compat import private_names
from .memory import is_trimmable

_this = threading.local()
# Attributes of Triton's launcher: bytes of scratch memory per program of a kernel, which it passes as a tensor.
_SCRATCH = ("global_scratch_size", "profile_scratch_size")


class UnsafeLaunchError(BaseException):
    """A BaseException, because ComfyUI and other packs catch Exception around a kernel and fall back to another one."""


@contextlib.contextmanager
def launches_by_address() -> Iterator[None]:
    """In this block and thread, pass addresses instead of tensors to Triton's launcher. Does nothing under torch's own
    allocator, whose memory the driver knows. Raises UnsafeLaunchError at a launch that cannot be converted, and again
    at the end, in case a bare `except` caught it.
    """
    _this.is_within, _this.refused = is_trimmable(), ""
    if _this.is_within and "triton" in sys.modules:  # the call ran before, so Triton is imported if it launches one
        _guard(private_names.CudaLauncher)
    try:
        yield
    finally:
        _this.is_within = False
    if _this.refused:
        raise UnsafeLaunchError(_this.refused)


@functools.cache
def _guard(launcher: type[Callable[..., None]] | None) -> None:
    """Patch the launcher once and for good: if two threads patch and restore it, one may restore the other's patch."""
    if launcher is None:
        return
    launch = launcher.__call__

    @functools.wraps(launch)
    def guarded(self: Any, *args: Any) -> None:
        if getattr(_this, "is_within", False):
            args = tuple(_address(each) for each in args)
            if any(map(_has_tensor, args)) or any(getattr(self, name, 0) for name in _SCRATCH):
                why = "launches a Triton kernel in a way that fails in a capture with cudaMallocAsync"
                _this.refused = f"{_caller()} {why}"
                raise UnsafeLaunchError(_this.refused)
        launch(self, *args)

    launcher.__call__ = guarded  # type: ignore[method-assign]


def _address(argument: Any) -> Any:
    """The address of a GPU tensor, or of Triton's view of one (TensorWrapper); any other argument unchanged."""
    kind = getattr(getattr(argument, "device", None), "type", "")
    return argument.data_ptr() if kind == "cuda" and hasattr(argument, "data_ptr") else argument


def _has_tensor(argument: Any) -> bool:
    """True if the launcher treats the argument as a tensor; also for a tuple with one, and a TensorDescriptor."""
    if isinstance(argument, tuple):
        return any(map(_has_tensor, argument))
    return hasattr(getattr(argument, "base", argument), "data_ptr")


def _caller() -> str:
    """The name of the module that called Triton."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "triton":
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))
