"""Operators of ours in torch's registry: a trace keeps a call of one as it is, and compiled code calls it by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_DEVICES = ("cpu", "cuda")


def defined(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    tags: Sequence[torch.Tag] = (),
) -> Callable[..., Any]:
    """`torch.ops.resolute.<name>`. The first copy of this pack in a process defines it.

    schema: its arguments and results, "(Tensor x) -> Tensor". run: computes it on the CPU and on CUDA. fake: makes its
    result without contents, for a trace.
    """
    if not hasattr(torch.ops.resolute, name):
        torch.library.define(f"resolute::{name}", schema, tags=tags)
        torch.library.impl(f"resolute::{name}", _DEVICES, run)
        torch.library.register_fake(f"resolute::{name}", fake)
    operator: Callable[..., Any] = getattr(torch.ops.resolute, name).default
    return operator
