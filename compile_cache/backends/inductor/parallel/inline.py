"""Compile a task in this process: where no worker can."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..compile.artifacts import pack
from ..compile.lowering import compile_trace
from ..compile.tracing import Trace
from ..regions.region import trace_of
from .task import CompileTask


def traced(task: CompileTask, between: Callable[[], None]) -> Trace:
    """The trace by the task's strategy. between: called between two operators. Raises whatever the block raises."""
    with torch.no_grad():
        return trace_of(task.call, task.hints, task.is_oblivious, between)


def compile_here(task: CompileTask, between: Callable[[], None], lock: AbstractContextManager[Any]) -> None:
    """Add the code to the task's region, to be compared by the next call. lock: of the table. Raises whatever torch
    raises.
    """
    call = task.call
    compiled = compile_trace(traced(task, between), keep=call.store is not None)
    with lock:
        call.region.add(compiled, functools.partial(pack, call.region.key, call.region.label, compiled))
