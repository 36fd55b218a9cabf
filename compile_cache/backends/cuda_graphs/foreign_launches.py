"""Triton kernels of other packages in a capture, to which Triton's launcher passes tensors.

The launcher asks the driver about each tensor's pointer, and the driver has no answer for memory that cudaMallocAsync,
ComfyUI's default, allocates inside a capture. Packages catch that error and compute something else, which was not
rehearsed: with SageAttention 1.0.6, torch 2.11 and an H100 that broke the capture, and the process ended. So the
launcher gets addresses, about which it does not ask, as our own kernels do (`KernelByAddress`). A launch whose
arguments are not that simple is refused, by an error that nothing catches on its way.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ...torch_facts import private_names
from .memory import is_trimmable

_this = threading.local()
# Attributes of Triton's launcher: bytes that it allocates for each program of a kernel, and passes as a tensor.
_SCRATCH = ("global_scratch_size", "profile_scratch_size")


class RefusedLaunchError(BaseException):
    """Not an Exception: ComfyUI and other packs catch those around their kernels, and go on with another one."""


@contextlib.contextmanager
def launches_by_address() -> Iterator[None]:
    """Within, Triton's launcher gets addresses for tensors in this thread; but not with torch's own allocator, whose
    memory the driver knows. Raises RefusedLaunchError where that is not possible, and again at the end, in case a bare
    `except` caught it.
    """
    _this.is_within, _this.refused = is_trimmable(), ""
    if _this.is_within and "triton" in sys.modules:  # what the call launches it has launched before
        _guard(private_names.CudaLauncher)
    try:
        yield
    finally:
        _this.is_within = False
    if _this.refused:
        raise RefusedLaunchError(_this.refused)


@functools.cache
def _guard(launcher: type[Callable[..., None]] | None) -> None:
    """Once, for good: if two threads put something in its place and back, one may put back what the other had put."""
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
                raise RefusedLaunchError(_this.refused)
        launch(self, *args)

    launcher.__call__ = guarded  # type: ignore[method-assign]


def _address(argument: Any) -> Any:
    """For a tensor on the GPU, or Triton's view of one (TensorWrapper), its address."""
    kind = getattr(getattr(argument, "device", None), "type", "")
    return argument.data_ptr() if kind == "cuda" and hasattr(argument, "data_ptr") else argument


def _has_tensor(argument: Any) -> bool:
    """True of what the launcher takes for one, of a tuple with one, and of a TensorDescriptor, whose `base` it is."""
    if isinstance(argument, tuple):
        return any(map(_has_tensor, argument))
    return hasattr(getattr(argument, "base", argument), "data_ptr")


def _caller() -> str:
    """The name of the module that called Triton."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "triton":
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))
