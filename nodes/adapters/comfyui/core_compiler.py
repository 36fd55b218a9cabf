"""Keeps core's own compiler (ComfyUI 0.34 and later) and ours from recording inside each other.

With comfy-aimdo on CUDA, core records the allocations of a forward (`comfy.model_prefetch.malloc_graph_begin`,
comfy_aimdo/malloc_graph.py) and captures CUDA graphs of its blocks inside that recording. A capture of ours inside its
recording, or its recording inside a capture of ours, fails or crashes the process.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import comfy.cli_args

# The flags that core checks in each call before it records or captures. ComfyUI 0.33 has the second flag only.
_FLAGS = ("disable_comfy_compiler", "disable_cuda_graphs")

_lock = threading.Lock()
_users = 0
_before: dict[str, Any] = {}


def is_recording() -> bool:
    """Core's compiler is recording in this thread, so a call of ours must run eagerly."""
    core = sys.modules.get("comfy.model_prefetch")  # absent in 0.8.0
    graph = getattr(core, "MALLOC_GRAPHS", {}).get(threading.get_ident())
    return graph is not None and bool(getattr(graph, "_comfy_active", False))


@contextmanager
def switched_off() -> Iterator[None]:
    """Inside the `with`, core's compiler starts nothing, in any thread: its switches belong to the process.

    This changes nothing during a recording of this thread. `malloc_graph_end` ends a recording without checking the
    switches, so after a begin that was skipped inside a recording it would end the outer one.
    """
    if is_recording():
        yield
        return
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            switches = vars(comfy.cli_args.args)
            _before.update({name: switches[name] for name in _FLAGS if name in switches})
            switches.update(dict.fromkeys(_before, True))


def _leave() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:  # calls on several GPUs overlap: the last one restores
            vars(comfy.cli_args.args).update(_before)
            _before.clear()
