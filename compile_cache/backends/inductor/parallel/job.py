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
from ....torch_facts.flags import apply_flags, flags_for_workers
from ....torch_facts.operators import NAMESPACE
from ....torch_facts.private_names import (
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
from ..compile import lowering, operators
from ..compile.artifacts import pack
from ..compile.environment import environment_of
from ..compile.lowering import compile_trace
from ..compile.tracing import Trace, size_one_is_general
from . import described_gpu
from .failures import NeedsGpuError, OtherEnvironmentError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A `Trace` in plain types.

    trace: what it has, by torch's GraphPickler. packages: those that define operators of the graph; the worker imports
    them first. settings: see `settings_for`.
    """

    key: str
    label: str
    trace: bytes
    packages: tuple[str, ...]
    oblivious: bool
    settings: dict[str, Any]


def settings_for(device: torch.device) -> dict[str, Any]:
    """The state of this process that a worker must take on, so that it generates the same code: inductor's settings,
    torch's flags, and the environment, which the worker must reach.
    """
    return {
        "device": str(device),
        "card": described_gpu.describe(device) if device.type == "cuda" else None,
        "inductor": portable_config(ignore_private_configs=True),
        "flags": flags_for_workers(),
        "environment": environment_of(device, "").components(),
    }


def job_of(key: str, label: str, traced: Trace, settings: dict[str, Any]) -> Job:
    """Raises what torch's pickler raises for a graph that it cannot pickle."""
    # By default torch pickles its own operators only.
    options = () if PickleOptions is None else (PickleOptions(ops_filter=None),)
    output = pytree.treespec_dumps(traced.output_spec)
    parts = (traced.graph, list(traced.fakes), traced.symbols, traced.static, traced.used_weights, output)
    content = GraphPickler.dumps((*parts, traced.branches, traced.quantized), *options)
    return Job(key, label, content, _packages_of(traced.graph), traced.oblivious, settings)


def _packages_of(graph: torch.fx.GraphModule) -> tuple[str, ...]:
    """The imported packages that have the names of operators' namespaces, as `comfy_kitchen` has.

    Not ours: the worker registers our operators itself, and another package may have our name.
    """
    spaces = {node.target.namespace for node in graph.graph.nodes if isinstance(node.target, OpOverload)}
    return tuple(sorted((spaces - {NAMESPACE}) & sys.modules.keys()))


# --- in the worker ---------------------------------------------------------------------------------------------

_applied: dict[str, Any] | None = None  # the settings of the last job


def before_fork() -> None:
    """Do once what each forked child would do at its first job: hash the code of torch and Triton, import modules.

    These are internals of torch; where another version moved one, the children do that part themselves.
    """
    parts = [torch_key, init_backend_registration, lambda: sympy.simplify(sympy.Symbol("x") + 1)]  # it imports much
    if find_spec("triton") is not None and triton_code_generator is not None:
        parts.append(triton_key)
    for part in parts:
        _try(part)


def before_fork_for(device: str) -> None:
    """The same, once it is known what the children compile for: "cpu" or "cuda"."""
    if device == "cpu" and pick_vec_isa is not None:
        _try(pick_vec_isa)  # starts ten processes that import torch: 15 s of a processor


def _try(part: Callable[[], object]) -> None:
    try:
        part()
    except Exception as error:  # an error that matters comes again in the child
        logger.debug("Resolute: each process that compiles does this for itself: %s", part, exc_info=error)


def serve(program: Connection, folder: str) -> None:
    """The life of a child: answer each job until the program ends.

    `folder` gets its temporary folders: a child that is killed leaves them, and the pool removes `folder`.
    """
    lowering.scratch = folder
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError):
        while True:
            program.send(work(program.recv()))


def work(message: dict[str, Any]) -> tuple[dict[str, Any] | str, float]:
    """Run a job. Returns (artifact or error text, seconds), all in plain types: torch's errors cannot be pickled."""
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
        kind = NeedsGpuError if described_gpu.asks_for_gpu(error) else type(error)
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
    """Take on the settings of the main process. Raises OtherEnvironmentError where that does not succeed.

    card: the GPU to compile for, if it is one. environment: the components of the fingerprint, in plain types.
    """
    try:
        if card is not None:
            described_gpu.stand_in(card)
        apply_flags(flags)
    except Exception as error:  # torch's internals raise any class
        raise OtherEnvironmentError(first_line(error)) from error
    load_config(inductor)  # after the flags: torch changes inductor's setting with that of deterministic algorithms
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
    mode = fakes[-1].fake_mode  # torch made it anew, with the ShapeEnv of the trace and the guards that it has so far
    spec = pytree.treespec_loads(output)
    traced = Trace(graph, fakes, static, used_weights, mode, mode.shape_env, symbols, spec, job.oblivious, *more)
    return pack(job.key, job.label, compile_trace(traced, keep=True))
