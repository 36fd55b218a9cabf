"""A trace as a job for a worker process, and the worker's side: compile the trace and return an artifact."""

from __future__ import annotations

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
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from ....errors import first_line
from ....store.artifact_store import Artifact
from ....torch_facts.flags import apply_flags, flags_for_workers
from ....torch_facts.operators import NAMESPACE
from ....torch_facts.out_of_memory import is_out_of_memory
from ....torch_facts.private_names import (
    FakeTensorMode,
    GraphPickler,
    OpOverload,
    PickleOptions,
    ShapeEnv,
    inductor_config,
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
from ..compile.tracing import Shapes, Trace, size_one_is_general

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0  # between two looks for memory


@dataclass(frozen=True)
class WorkerSettings:
    """The state of this process that a worker must take on, so that it generates the same code.

    inductor: inductor's settings; flags: see `flags_for_workers`; environment: a digest, which the worker must reach.
    """

    device: str
    inductor: dict[str, Any]
    flags: dict[str, Any]
    environment: str


@dataclass(frozen=True)
class Job:
    """A `Trace` in plain types. trace: graph, fakes and symbols by torch's GraphPickler; output: tree spec as JSON.

    packages: those that define operators of the graph. The worker imports them first.
    """

    key: str
    label: str
    trace: bytes
    packages: tuple[str, ...]
    static: Shapes
    used_weights: tuple[int, ...]
    output: str
    oblivious: bool
    quantized: tuple[tuple[str, str], ...] = ()


def settings_for(device: torch.device) -> WorkerSettings:
    settings = portable_config(ignore_private_configs=True)
    return WorkerSettings(str(device), settings, flags_for_workers(), environment_of(device, "").digest())


def job_of(key: str, label: str, traced: Trace) -> Job:
    """Raises what torch's pickler raises for a graph that it cannot pickle."""
    # By default torch pickles its own operators only.
    options = () if PickleOptions is None else (PickleOptions(ops_filter=None),)
    content = GraphPickler.dumps((traced.graph, list(traced.fakes), traced.symbols), *options)
    output = pytree.treespec_dumps(traced.output_spec)
    packages = _packages_of(traced.graph)
    return Job(
        key, label, content, packages, traced.static, traced.used_weights, output, traced.oblivious, traced.quantized
    )


def _packages_of(graph: torch.fx.GraphModule) -> tuple[str, ...]:
    """The imported packages that have the names of operators' namespaces, as `comfy_kitchen` has.

    Not ours: the worker registers our operators itself, and another package may have our name.
    """
    spaces = {node.target.namespace for node in graph.graph.nodes if isinstance(node.target, OpOverload)}
    return tuple(sorted((spaces - {NAMESPACE}) & sys.modules.keys()))


# --- in the worker ---------------------------------------------------------------------------------------------

_applied: dict[str, Any] | None = None  # the settings of the last job


def before_fork() -> None:
    """Do once what each forked child would do at its first job: hash the code of torch and Triton, import modules, find
    the CPU's vector instructions.

    Nothing here may initialise CUDA: a forked child could not use it then. These are internals of torch; where another
    version moved one, the children do that part themselves.
    """
    parts: dict[str, Callable[[], Any]] = {
        "torch's hash": torch_key,
        "Triton's hash": _hash_triton,
        "code generators": init_backend_registration,
        "sympy's late imports": lambda: sympy.simplify(sympy.Symbol("x") + 1),
        "vector instructions": _find_instructions,
    }
    for name, part in parts.items():
        try:
            part()
        except Exception as error:  # an error that matters comes again in the child
            logger.debug("Resolute: each process that compiles does this for itself: %s", name, exc_info=error)


def _hash_triton() -> None:
    if find_spec("triton") is not None and triton_code_generator is not None:
        triton_key()


def _find_instructions() -> None:
    """Inductor starts a process that imports torch for each set of instructions: ten, 15 s of a processor."""
    if pick_vec_isa is not None and not torch.cuda.is_available():
        pick_vec_isa()


def begin(device: str, folder: str, waiting: Any) -> None:
    """Initialise a child. `folder` gets its temporary folders: a child that is killed leaves them, and the pool
    removes `folder`.

    A child without memory on the device waits for some, and takes no job: the others get them. waiting: a counter of
    such children that all share. Ends the process where it cannot use the device: an error would print a traceback for
    each child. The pool is broken then, and the main process compiles without it.
    """
    lowering.scratch = folder
    threading.Thread(target=_end_with_parent, daemon=True).start()
    inductor_config.compile_threads = 1  # the children already use all processors
    if _has_context(device):  # asked now, not in the first job: the driver may not support forks
        return
    with waiting.get_lock():
        waiting.value += 1
    while not _has_context(device):
        time.sleep(_RETRY_SECONDS)
    with waiting.get_lock():
        waiting.value -= 1


def _has_context(device: str) -> bool:
    """Take the device's memory that every job needs. Returns False if there is none."""
    try:
        torch.zeros(1, device=device)
    except Exception as error:  # noqa: BLE001 (see `begin`)
        logger.debug("Resolute: this process cannot compile for %s: %s", device, first_line(error))
        if not is_out_of_memory(error):
            os._exit(1)
        return False
    return True


def ready() -> None:
    """An empty job: its result means that a child is initialised."""


def work(settings: dict[str, Any], job: dict[str, Any]) -> tuple[dict[str, Any] | str, float]:
    """Run a job. Returns (artifact or error text, seconds), all in plain types: torch's errors cannot be pickled."""
    global _applied
    started = time.perf_counter()
    try:
        if settings != _applied:
            _apply(WorkerSettings(**settings))
            _applied = settings
            started = time.perf_counter()
        made: dict[str, Any] | str = vars(_run(Job(**job)))
    except Exception as error:  # noqa: BLE001 (the main process logs it, and compiles the region itself)
        made = f"{type(error).__name__}: {first_line(error)}"
    return made, time.perf_counter() - started


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _apply(settings: WorkerSettings) -> None:
    """Take on the settings of the main process. Raises RuntimeError if the flags or the environment still differ."""
    load_config(settings.inductor)
    inductor_config.compile_threads = 1
    apply_flags(settings.flags)
    if environment_of(torch.device(settings.device), "").digest() != settings.environment:
        raise RuntimeError("the environment of this worker differs from that of the main process")


def _run(job: Job) -> Artifact:
    operators.register()
    for package in job.packages:
        importlib.import_module(package)
    with size_one_is_general(job.oblivious):
        loaded: Any = GraphPickler.loads(job.trace, FakeTensorMode(shape_env=ShapeEnv()))
    graph, fakes, symbols = loaded
    mode = fakes[-1].fake_mode  # torch made it anew, with the ShapeEnv of the trace and the guards that it has so far
    spec = pytree.treespec_loads(job.output)
    traced = Trace(
        graph, fakes, job.static, job.used_weights, mode, mode.shape_env, symbols, spec, job.oblivious, job.quantized
    )
    return pack(job.key, job.label, compile_trace(traced, keep=True))
