"""Compile a traced graph with inductor, and make its launches fit for capture on every allocator."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

from .environment import own_settings
from .group_norm import decompositions
from .shape_guards import ShapeGuards
from .tracing import Trace, size_one_is_general

# torch's symbolic arithmetic logs thousands of harmless lines for odd sizes through these loggers.
_NOISY_LOGGERS = ("torch.utils._sympy.interp", "torch.fx.experimental.symbolic_shapes")

scratch: str | None = None  # where temporary folders are made, None for the system's place

Choice = dict[str, Any]  # block sizes and numbers of warps and stages, as Triton names them
Run = Callable[[list[torch.Tensor]], Sequence[Any]]


class Compiled:
    """Inductor's code for one trace: takes `weights + inputs`, flat, in the order of the trace; gives flat outputs.

    graph: what inductor gave; None where a trace does nothing but hand inputs through, and inductor gives a function.
    kernels: its Triton kernels by name.
    libraries: files that the code loads, by their place in inductor's cache; none where it brings its kernels along.
    from_disk: whether inductor had it in its own cache, which does not tell all that lowering once assumed.
    """

    def __init__(
        self,
        made: CompiledFxGraph | Run,
        kernels: Mapping[str, KernelByAddress] | None = None,
        libraries: Mapping[str, bytes] | None = None,
        from_disk: bool = False,
    ) -> None:
        self.from_disk = from_disk
        self.kernels = kernels or {}
        self.graph = made if isinstance(made, CompiledFxGraph) else None
        self.libraries = libraries or {}
        run = made.current_callable if isinstance(made, CompiledFxGraph) else made
        assert run is not None, "a graph that was compiled or loaded has its code"
        self._run = run

    def __call__(self, tensors: list[torch.Tensor]) -> Sequence[Any]:
        """Takes the list for itself, as inductor's code does: it lets go of each input after its last use."""
        return self._run(tensors)


def compile_trace(trace: Trace, options: dict[str, Any], keep: bool = False) -> Compiled:
    """Compile for every size that meets the trace's assumptions. `options` are settings of inductor.

    keep: whether the result is to be stored; then it knows its libraries.
    """
    loaded, hits = len(PyCodeCache.modules), counters["inductor"]["fxgraph_cache_hit"]
    made: list[CompiledFxGraph | Run] = []

    def inner(graph: Any, inputs: Any, **kwargs: Any) -> Any:
        made.append(compile_fx_inner(graph, inputs, **kwargs))
        return made[-1]

    on_cpu = all(fake.device.type == "cpu" for fake in trace.fakes)
    with (
        _quiet(),
        _own_folder(keep and on_cpu) as libraries,
        torch._guards.tracing(torch._guards.TracingContext(trace.fake_mode)),
        torch.no_grad(),
        size_one_is_general(trace.oblivious),
        own_settings(),
        inductor_config.patch(options),
        # AOTAutograd has nothing to do for a graph without gradients or writes: what it would keep is this one graph.
        functorch_config.patch(enable_autograd_cache=False),
    ):
        compile_fx(trace.graph, trace.fakes, inner_compile=inner, decompositions=decompositions())
    kernels = launch_by_address(PyCodeCache.modules[loaded:])  # whether generated now or found in inductor's disk cache
    (graph,) = made
    return Compiled(graph, kernels, libraries, counters["inductor"]["fxgraph_cache_hit"] > hits)


def assumptions_of(trace: Trace, compiled: Compiled) -> ShapeGuards:
    """What tracing and lowering assumed. What inductor found in its cache was lowered by somebody for whom every size
    counted as larger than 1: then that is an assumption too.
    """
    larger = [sympy.Gt(symbol, 1) for symbol in trace.symbols.values()] if compiled.from_disk else []
    return ShapeGuards([*trace.assumptions, *larger], trace.symbols)


@contextlib.contextmanager
def _own_folder(wanted: bool) -> Iterator[dict[str, bytes]]:
    """Let inductor work in an empty folder, and yield what will be the libraries that it put there, by relative path.

    On the CPU its graphs name libraries in its cache and do not hold them; on CUDA they hold their kernels.
    """
    libraries: dict[str, bytes] = {}
    if not wanted:
        yield libraries
        return
    with tempfile.TemporaryDirectory(prefix="resolute-", dir=scratch, ignore_cleanup_errors=True) as folder:
        with temporary_cache_dir(folder):
            yield libraries
        for path in Path(folder).rglob("*"):
            if path.suffix in (".so", ".pyd", ".dll") and path.is_file():
                libraries[path.relative_to(folder).as_posix()] = path.read_bytes()


class KernelByAddress:
    """Launches one of our Triton kernels with device addresses instead of tensors.

    Triton's launcher asks the driver about each tensor's pointer, and memory that cudaMallocAsync (ComfyUI's default)
    hands out inside a capture cannot be asked about: the launch fails with "invalid argument". An address passes
    unasked. Until autotuning has settled on one configuration the tensors themselves are needed.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    @property
    def choice(self) -> Choice | None:
        """The configuration that autotuning settled on; None before."""
        launchers = self._kernel.launchers
        return _choice(launchers[0]) if len(launchers) == 1 else None

    def choose(self, choice: Choice) -> None:
        """Settle on what was found before, which spares a measurement of each configuration; else do nothing."""
        matching = [launcher for launcher in self._kernel.launchers if _choice(launcher) == choice]
        if len(matching) == 1:
            self._kernel.launchers = matching

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if len(self._kernel.launchers) == 1:
            args = tuple(arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args)
        return self._kernel.run(*args, **kwargs)


def _choice(launcher: Any) -> Choice:
    config = launcher.config
    return {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}


def launch_by_address(modules: Iterable[ModuleType]) -> dict[str, KernelByAddress]:
    """Prepare modules of generated code, in place. Returns their kernels by name."""
    kernels: dict[str, KernelByAddress] = {}
    for module in modules:
        for name, value in list(vars(module).items()):
            if type(value).__name__ == "CachingAutotuner":
                value = KernelByAddress(value)
                setattr(module, name, value)
            if isinstance(value, KernelByAddress):  # also one that another region of this process has
                kernels[name] = value
    return kernels


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
