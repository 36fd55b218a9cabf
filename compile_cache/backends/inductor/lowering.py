"""Compile a traced graph with inductor, and make its launches fit for capture on every allocator."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, cast

import torch
from torch._inductor import config as inductor_config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx

from .tracing import Trace, size_one_is_general

# A function of `weights + inputs`, flat, in the order of the trace; returns the flat outputs.
Compiled = Callable[..., Any]

# torch's symbolic arithmetic logs thousands of harmless lines for odd sizes through these loggers.
_NOISY_LOGGERS = ("torch.utils._sympy.interp", "torch.fx.experimental.symbolic_shapes")


def compile_trace(trace: Trace, options: dict[str, Any]) -> Compiled:
    """Compile for every size that meets the trace's assumptions. `options` are settings of inductor."""
    loaded = len(PyCodeCache.modules)
    with (
        _quiet(),
        torch._guards.tracing(torch._guards.TracingContext(trace.fake_mode)),
        torch.no_grad(),
        size_one_is_general(trace.oblivious),
        inductor_config.patch(options),
    ):
        compiled: Any = compile_fx(trace.graph, trace.fakes)
    for module in PyCodeCache.modules[loaded:]:  # whether generated now or found in inductor's disk cache
        _launch_by_address(module)
    return cast(Compiled, compiled)


class AddressedKernel:
    """Launches one of our Triton kernels with device addresses instead of tensors.

    Triton's launcher asks the driver about each tensor's pointer, and memory that cudaMallocAsync (ComfyUI's default)
    hands out inside a capture cannot be asked about: the launch fails with "invalid argument". An address passes
    unasked. Until autotuning has settled on one configuration the tensors themselves are needed.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if len(self._kernel.launchers) == 1:
            args = tuple(arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args)
        return self._kernel.run(*args, **kwargs)


def _launch_by_address(module: ModuleType) -> None:
    for name, value in list(vars(module).items()):
        if type(value).__name__ == "CachingAutotuner":
            setattr(module, name, AddressedKernel(value))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _NOISY_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
