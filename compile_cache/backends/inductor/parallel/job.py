"""One trace on its way to a worker, and the artifact that comes back."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import threading
import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.utils._pytree as pytree
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ....errors import first_line
from ....store.artifact_store import Artifact
from ..compile import lowering
from ..compile.artifacts import pack
from ..compile.environment import apply_flags, environment_of, flags
from ..compile.lowering import assumptions_of, compile_trace
from ..compile.tracing import Trace, size_one_is_general
from ..compile.variant import Shapes, Variant

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What a worker must have in common with the process that it works for."""

    device: str
    inductor: dict[str, Any]
    flags: dict[str, Any]
    environment: str  # digest: code for another one is of no use


@dataclass(frozen=True)
class Job:
    """trace: graph, inputs and symbols, as torch's own pickler writes them; output: a tree spec as JSON."""

    key: str
    label: str
    trace: bytes
    used_weights: tuple[int, ...]
    output: str
    oblivious: bool
    static: Shapes
    options: dict[str, Any]


def settings_for(device: torch.device) -> Settings:
    settings = inductor_config.save_config_portable(ignore_private_configs=True)
    return Settings(str(device), settings, flags(), environment_of(device, "").digest())


def job_of(key: str, label: str, traced: Trace, static: Shapes, options: dict[str, Any]) -> Job:
    content = GraphPickler.dumps((traced.graph, list(traced.fakes), traced.symbols))
    output = pytree.treespec_dumps(traced.output_spec)
    return Job(key, label, content, traced.used_weights, output, traced.oblivious, static, options)


# --- in the worker ---------------------------------------------------------------------------------------------

_prepared: dict[str, Any] | None = None


def before_children() -> None:
    """Do once what each forked child would do at its first job: hash the code of torch and Triton, import the rest.

    Nothing here wakes a GPU's driver, which no forked child could use then. What another version of torch keeps
    elsewhere is left to the children.
    """
    for share in (_hash_torch, _hash_triton, _import_code_generators, _import_late_sympy):
        try:
            share()
        except Exception as error:  # what matters fails in a child too
            logger.debug("Resolute: each process that compiles does %s for itself", share.__name__, exc_info=error)


def _hash_torch() -> None:
    from torch._inductor.codecache import torch_key

    torch_key()


def _hash_triton() -> None:
    if find_spec("triton") is None:
        return
    importlib.import_module("triton.compiler.code_generator")
    try:
        from torch._inductor.runtime.triton_compat import triton_key
    except ImportError:  # before torch 2.9
        triton_key = importlib.import_module("triton.compiler.compiler").triton_key
    triton_key()


def _import_code_generators() -> None:
    from torch._inductor.codegen.common import init_backend_registration

    init_backend_registration()


def _import_late_sympy() -> None:
    sympy.simplify(sympy.Symbol("x") + 1)


def begin(device: str, folder: str) -> None:
    """A worker starts, whose temporary folders are in `folder`: one that is killed leaves them behind.

    Raises whatever torch raises where the device cannot be used from it.
    """
    lowering.scratch = folder
    threading.Thread(target=_end_with_parent, daemon=True).start()
    inductor_config.compile_threads = 1  # there are as many workers as there is work for processors
    torch.zeros(1, device=device)  # a driver that does not take to this process says so now


def ready() -> None:
    """Something to wait for until a worker has begun."""


def work(settings: dict[str, Any], job: dict[str, Any]) -> tuple[dict[str, Any] | str, float]:
    """(the artifact or what went wrong, seconds) of a job, all in plain types: torch's errors hold what no process can
    send to another.
    """
    global _prepared
    started = time.perf_counter()
    try:
        if settings != _prepared:
            _prepare(Settings(**settings))
            _prepared = settings
            started = time.perf_counter()
        made: dict[str, Any] | str = vars(_run(Job(**job)))
    except Exception as error:  # noqa: BLE001 (whoever asked logs it, and compiles the region itself)
        made = f"{type(error).__name__}: {first_line(error)}"
    return made, time.perf_counter() - started


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _prepare(settings: Settings) -> None:
    """Make this process one like that which asks. Raises RuntimeError where it cannot be."""
    inductor_config.load_config(settings.inductor)
    inductor_config.compile_threads = 1
    apply_flags(settings.flags)
    if environment_of(torch.device(settings.device), "").digest() != settings.environment:
        raise RuntimeError("this process is another environment than the one that asks")


def _run(job: Job) -> Artifact:
    with size_one_is_general(job.oblivious):
        loaded: Any = GraphPickler.loads(job.trace, FakeTensorMode(shape_env=ShapeEnv()))
    graph, fakes, symbols = loaded
    mode = fakes[-1].fake_mode  # with the ShapeEnv of the trace: its settings, and its assumptions so far
    spec = pytree.treespec_loads(job.output)
    traced = Trace(graph, fakes, job.used_weights, mode, mode.shape_env, symbols, spec, job.oblivious)
    compiled = compile_trace(traced, job.options, keep=True)
    assumptions = assumptions_of(traced, compiled)
    return pack(job.key, job.label, Variant(compiled, assumptions, job.static, job.used_weights, spec))
