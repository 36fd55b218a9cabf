"""Our operators in torch's registry: a trace records a call as one opaque node, and compiled code calls it by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

NAMESPACE = "resolute"
_DEVICES = ("cpu", "cuda")
T = TypeVar("T")


def defined(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    tags: Sequence[torch.Tag] = (),
) -> Callable[..., Any]:
    """Return `torch.ops.resolute.<name>`. The first copy of this pack in a process defines it. Thread-safe.

    schema: its arguments and results, "(Tensor x) -> Tensor". run: its kernel on the CPU and on CUDA. fake: makes its
    result without data, for a trace.
    """
    with shared("defining", threading.RLock):  # a call loads stored code while a thread prepares for compiles
        if not hasattr(torch.ops.resolute, name):
            torch.library.define(f"{NAMESPACE}::{name}", schema, tags=tags)
            torch.library.impl(f"{NAMESPACE}::{name}", _DEVICES, run)
            torch.library.register_fake(f"{NAMESPACE}::{name}", fake)
    operator: Callable[..., Any] = getattr(torch.ops.resolute, name).default
    return operator


def shared(name: str, make: Callable[[], T]) -> T:
    """Return the object that an operator's functions read. The first copy of this pack in a process makes it.

    torch registers operators by name, so two copies of this pack in one process share them. With one table per copy,
    an operator would read only the table of the copy that defined it.
    """
    found: T = vars(torch.ops.resolute).setdefault(name, make())
    return found
