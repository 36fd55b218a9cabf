"""A trace as a job for a worker process, and the worker's side: compile the trace and return an artifact."""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from ....errors import first_line
from ....store.artifact_store import Artifact
from ....store.fingerprint import EnvironmentFingerprint
from ....torch_compat.flags import apply_flags, flags_for_workers
from ....torch_compat.operators import NAMESPACE
from ....torch_compat.private_names import (
    FakeTensorMode,
    GraphPickler,
    OpOverload,
    PickleOptions,
    ShapeEnv,
    init_backend_registration,
    load_config,
    pick_vec_isa,
    portable_config,
    pytree,
    torch_key,
    triton_code_generator,
    triton_key,
)
from ..lower import lowering, operators
from ..lower.artifacts import pack
from ..lower.environment import environment_of
from ..lower.lowering import compile_trace
from ..lower.tracing import Trace, size_one_is_general
from . import described_gpu
from .failures import NeedsGpuError, OtherEnvironmentError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A `Trace` in plain types.

    trace: the trace's contents, pickled by torch's GraphPickler. packages: packages that define operators of the graph;
    the worker imports them first. settings: see `settings_for`.
    """

    key: str
    label: str
    trace: bytes
    packages: tuple[str, ...]
    oblivious: bool
    settings: dict[str, Any]


def settings_for(device: torch.device) -> dict[str, Any]:
    """The state of this process that a worker must apply to generate the same code: inductor's settings and torch's
    flags; also the environment, which the worker must match afterwards.
    """
    return {
        "device": str(device),
        "card": described_gpu.describe(device) if device.type == "cuda" else None,
        "inductor": portable_config(ignore_private_configs=True),
        "flags": flags_for_workers(),
        "environment": environment_of(device, "").components(),
    }


def job_of(key: str, label: str, traced: Trace, settings: dict[str, Any]) -> Job:
    """Make the job of a trace. Raises the errors of torch's pickler for a graph that it cannot pickle."""
    # By default torch pickles only its own operators.
    options = () if PickleOptions is None else (PickleOptions(ops_filter=None),)
    output = pytree.treespec_dumps(traced.output_spec)
    parts = (traced.graph, list(traced.fakes), traced.symbols, traced.static, traced.used_weights, output)
    content = GraphPickler.dumps((*parts, traced.branches, traced.quantized), *options)
    return Job(key, label, content, _packages_of(traced.graph), traced.oblivious, settings)


def _packages_of(graph: torch.fx.GraphModule) -> tuple[str, ...]:
    """The imported packages named like the namespace of an operator in the graph, such as `comfy_kitchen`.

    Excludes our own namespace: the worker registers our operators itself, and another package may have our name.
    """
    spaces = {node.target.namespace for node in graph.graph.nodes if isinstance(node.target, OpOverload)}
    return tuple(sorted((spaces - {NAMESPACE}) & sys.modules.keys()))


# --- in the worker ---------------------------------------------------------------------------------------------

_applied: dict[str, Any] | None = None  # the settings applied last


def before_fork() -> None:
    """Do the first-job work of forked children once, before the fork: hash torch's and Triton's code, import modules.

    This uses internals of torch; where another version lacks one, each child does that part itself.
    """
    parts = [torch_key, init_backend_registration, lambda: sympy.simplify(sympy.Symbol("x") + 1)]  # imports much
    if find_spec("triton") is not None and triton_code_generator is not None:
        parts.append(triton_key)
    for part in parts:
        _try(part)


def before_fork_for(device: str) -> None:
    """Do the part of `before_fork` that depends on the children's device type, "cpu" or "cuda"."""
    if device == "cpu" and pick_vec_isa is not None:
        _try(pick_vec_isa)  # starts ten processes that import torch: 15 s of processor time


def _try(part: Callable[[], object]) -> None:
    try:
        part()
    except Exception as error:  # an error that matters is raised again in the child
        logger.debug("Resolute: each process that compiles does this for itself: %s", part, exc_info=error)


def serve(program: Connection, folder: str) -> None:
    """The main loop of a child: answer each job until the program ends.

    folder: for temporary folders. A killed child leaves them behind; the pool then removes `folder`.
    """
    lowering.scratch = folder
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError):
        while True:
            program.send(work(program.recv()))


def work(message: dict[str, Any]) -> tuple[dict[str, Any] | str, float]:
    """Run a job. Returns (artifact or error text, seconds) in plain types, because torch's errors cannot be pickled."""
    global _applied
    started = time.perf_counter()
    job = Job(**message)
    try:
        if job.settings != _applied:
            _applied = None
            _apply(**job.settings)
            _applied = job.settings
            started = time.perf_counter()
        made: dict[str, Any] | str = vars(_run(job))
    except Exception as error:  # noqa: BLE001 (the main process logs it, and compiles the region itself)
        kind = NeedsGpuError if described_gpu.needs_real_gpu(error) else type(error)
        made = f"{kind.__name__}: {first_line(error)}"
    return made, time.perf_counter() - started


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _apply(
    device: str,
    card: described_gpu.Description | None,
    inductor: dict[str, Any],
    flags: dict[str, Any],
    environment: list[Any],
) -> None:
    """Apply the settings of the main process. Raises OtherEnvironmentError if this process cannot match them.

    card: the GPU to compile for; None for the CPU. environment: the fingerprint's components, in plain types.
    """
    try:
        if card is not None:
            described_gpu.install_fake_gpu(card)
        apply_flags(flags)
    except Exception as error:  # torch's internals raise any class
        raise OtherEnvironmentError(first_line(error)) from error
    load_config(inductor)  # after the flags: setting deterministic algorithms also changes inductor's setting
    wanted = EnvironmentFingerprint(**dict(environment))
    if differing := environment_of(torch.device(device), "").difference(wanted):
        raise OtherEnvironmentError("; ".join(differing))


def _run(job: Job) -> Artifact:
    operators.register()
    for package in job.packages:
        importlib.import_module(package)
    with size_one_is_general(job.oblivious):
        loaded: Any = GraphPickler.loads(job.trace, FakeTensorMode(shape_env=ShapeEnv()))
    graph, fakes, symbols, static, used_weights, output, *more = loaded
    mode = fakes[-1].fake_mode  # unpickling rebuilt it, with the trace's ShapeEnv and the guards recorded so far
    spec = pytree.treespec_loads(output)
    traced = Trace(graph, fakes, static, used_weights, mode, mode.shape_env, symbols, spec, job.oblivious, *more)
    return pack(job.key, job.label, compile_trace(traced, keep=True))
