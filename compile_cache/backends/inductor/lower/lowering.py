"""Compile a trace with inductor."""

from __future__ import annotations

import contextlib
import logging
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from ....store.temporary_folders import TemporaryFolder
from ....torch_compat.private_names import (
    NOISY_LOGGERS,
    CompiledFxGraph,
    PyCodeCache,
    TracingContext,
    compile_fx,
    compile_fx_inner,
    counters,
    functorch_config,
    inductor_config,
    temporary_cache_dir,
    tracing,
)
from .compiled_region import CompiledRegion, FlatCode, launch_by_address
from .decompositions import decompositions
from .environment import own_settings
from .frames import convolutions_channels_last
from .private_cache import IN_THIS_PROCESS, header_settings, inductor_lock, private_cache
from .shape_guards import ShapeGuards
from .tracing import Trace, size_one_is_general
from .whole_rows import persistent_reductions

_IS_WINDOWS = sys.platform == "win32"

scratch: str | None = None  # the parent of temporary folders; None: the system's


def compile_trace(trace: Trace, keep: bool = False) -> CompiledRegion:
    """Compile a trace with inductor (`compile_fx`), for every size that its guards allow.

    keep: True if the result will be stored; then it contains the shared libraries that it loads on the CPU. Raises
    inductor's errors. Only one compile or load runs at a time.
    """
    with inductor_lock:
        return _compile(trace, keep)


def _compile(trace: Trace, keep: bool) -> CompiledRegion:
    device = trace.fakes[-1].device
    loaded, hits = len(PyCodeCache.modules), _cache_hits()
    made: list[CompiledFxGraph | FlatCode] = []

    def inner(graph: Any, inputs: Any, **kwargs: Any) -> Any:
        if "get_decomp_fn" in kwargs:  # newer torch; inductor's own cache cannot pickle a table of decompositions
            kwargs["get_decomp_fn"] = decompositions
        with convolutions_channels_last():
            made.append(compile_fx_inner(graph, inputs, **kwargs))
        return made[-1]

    with (
        _quiet(),
        _own_folder(keep and device.type == "cpu") as libraries,
        tracing(TracingContext(trace.fake_mode)),
        torch.no_grad(),
        size_one_is_general(trace.oblivious),
        own_settings(),
        persistent_reductions(),
        inductor_config.patch({**_options(device, trace), **header_settings(), **IN_THIS_PROCESS}),
        # AOTAutograd's cache saves no time for a graph without gradients or mutations, and would store this one.
        functorch_config.patch(enable_autograd_cache=False),
    ):
        compile_fx(trace.graph, trace.fakes, inner_compile=inner, decompositions=decompositions())
    (compiled,) = made
    graph = compiled if isinstance(compiled, CompiledFxGraph) else None
    return CompiledRegion(
        code=compiled if graph is None else code_of(graph),
        guards=_guards(trace, from_disk=hits is None or _cache_hits() != hits),
        static=trace.static,
        used_weights=trace.used_weights,
        output_spec=trace.output_spec,
        kernels=launch_by_address(PyCodeCache.modules[loaded:]),
        graph=graph,
        libraries=libraries,
        quantized=trace.quantized,
    )


def _cache_hits() -> int | None:
    """The number of hits in inductor's own disk cache; None if this torch does not count them."""
    return None if counters is None else int(counters["inductor"]["fxgraph_cache_hit"])


def code_of(graph: CompiledFxGraph) -> FlatCode:
    """The callable of a compiled or loaded graph."""
    code: FlatCode | None = graph.current_callable
    assert code is not None
    return code


def _options(device: torch.device, trace: Trace) -> dict[str, Any]:
    """Inductor's settings for a device.

    On CUDA activations stay channels-last between regions: convolutions are fastest with it, and tokens are views of
    it. Pointwise kernels use inductor's default block sizes: autotuning them took seconds and gained nothing.
    Matrices are not padded: inductor would benchmark that on a GPU, and a worker has none. On Windows a kernel's name
    omits its operators: it is part of Triton's file names, and a path has at most 259 characters.
    On a CPU inductor makes feature maps channels-last, and expects a convolution over frames to keep that. Torch
    chooses the kernel by size; the kernel for small sizes returns contiguous results, and the code fails on these.
    """
    if device.type != "cpu":
        names = {"triton.descriptive_names": False} if _IS_WINDOWS else {}
        return {"force_layout_optimization": True, "triton.autotune_pointwise": False, "shape_padding": False, **names}
    return {"layout_optimization": False} if _convolves_frames(trace) else {}


def _convolves_frames(trace: Trace) -> bool:
    nodes = (node for node in trace.graph.graph.nodes if node.target is torch.ops.aten.convolution.default)
    return any(len(node.args[3]) == 3 for node in nodes)  # its strides: frames, rows and columns


def _guards(trace: Trace, from_disk: bool) -> ShapeGuards:
    """The guards of tracing and lowering.

    A graph from inductor's own disk cache was lowered for another trace, whose guards are unknown. It may assume sizes
    larger than 1, so add that guard.
    """
    larger = [sympy.Gt(symbol, 1) for symbol in trace.symbols.values()] if from_disk else []
    return ShapeGuards([*trace.guards, *larger], trace.symbols, trace.branches)


@contextlib.contextmanager
def _own_folder(wanted: bool) -> Iterator[dict[str, bytes]]:
    """If wanted, give inductor an empty cache folder. Yields a dict; at the end it gets the shared libraries, by path.

    On the CPU inductor's graph only refers to libraries in its cache; on CUDA the graph contains its kernels.
    """
    libraries: dict[str, bytes] = {}
    if not wanted:
        with private_cache():
            yield libraries
        return
    with _scratch_folder() as folder:
        with temporary_cache_dir(folder):
            yield libraries
        for path in Path(folder).rglob("*"):
            if path.suffix in (".so", ".pyd", ".dll") and path.is_file():
                libraries[path.relative_to(folder).as_posix()] = path.read_bytes()


@contextlib.contextmanager
def _scratch_folder() -> Iterator[str]:
    if scratch is not None:  # in a worker: the pool removes it
        with tempfile.TemporaryDirectory(dir=scratch, ignore_cleanup_errors=True) as within:
            yield within
        return
    folder = TemporaryFolder()
    try:
        yield str(folder.path)
    finally:
        folder.remove()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in NOISY_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
