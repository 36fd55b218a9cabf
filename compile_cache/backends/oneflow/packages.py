"""The installed packages and the reasons why OneFlow cannot run here, determined without importing OneFlow.

Importing OneFlow opens a port, replaces `sys.exit` and sets environment variables. Without a driver, querying the GPU's
name through OneFlow ends the process. So a probe does neither; only code that builds a graph calls `oneflow()`.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...packages import version_of
from ...torch_compat.gpu import is_nvidia

REQUIREMENTS = "requirements/oneflow.txt"
# Public OneFlow contains GPU code for these compute capabilities, and no PTX for a driver to compile for newer GPUs.
# A GPU runs code of the same major and an equal or lower minor version: 8.9 (RTX 40) runs the code for 8.6.
_ARCHITECTURES = ((6, 0), (6, 1), (7, 0), (7, 5), (8, 0), (8, 6))
_PUBLIC = "0.9."


@dataclass(frozen=True, slots=True)
class Installed:
    """Versions of the two packages; None if not installed."""

    oneflow: str | None
    onediff: str | None

    def __str__(self) -> str:
        return f"oneflow {self.oneflow}" + (f", onediff {self.onediff}" if self.onediff else "")


def installed() -> Installed:
    """The installed versions, from the package metadata."""
    return Installed(version_of("oneflow") or None, version_of("onediff") or None)


def onediff_is_native() -> bool:
    """True if onediff is installed with a OneFlow newer than the public 0.9, which onediff needs."""
    found = installed()
    return found.onediff is not None and found.oneflow is not None and not found.oneflow.startswith(_PUBLIC)


def unavailable_reason(device: str) -> tuple[str, str] | None:
    """The reason why OneFlow cannot run on this device type, and the remedy; None if it can."""
    found = installed()
    if found.oneflow is None:
        return _not_installed()
    if sys.platform != "linux":
        return "OneFlow has builds for Linux only", "Choose 'auto'."
    if device == "cpu":
        return None
    if not is_nvidia(device):
        return f"OneFlow runs on NVIDIA GPUs and on the CPU, and this model runs on '{device}'", "Choose 'auto'."
    if not torch.cuda.is_available():
        return "there is no NVIDIA driver, and OneFlow would end the process", "Choose 'auto'."
    return _unsupported_gpu(found.oneflow)


def _not_installed() -> tuple[str, str]:
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return (
        f"OneFlow is not installed; its public builds are for Python 3.10 and older, and this is Python {python}",
        f"Install it in a Python 3.10 with `python -m pip install -r {REQUIREMENTS}` (in Resolute's folder), or choose "
        "'auto'.",
    )


def _unsupported_gpu(oneflow_version: str) -> tuple[str, str] | None:
    if not oneflow_version.startswith(_PUBLIC):
        return None  # a custom build: we do not know which GPUs it supports
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        if not any(major == own and minor >= lowest for own, lowest in _ARCHITECTURES):
            return (
                f"{torch.cuda.get_device_name(index)} is of architecture {major}.{minor}, and OneFlow "
                f"{oneflow_version} has code for 6.0 to 8.9 only (GTX 10 to RTX 40)",
                "Choose 'auto' or 'inductor'.",
            )
    return None


@functools.cache
def oneflow() -> Any:
    """The package, imported at the first use; undoes the import's changes to the process. Raises ImportError."""
    with process_state_restored():
        return importlib.import_module("oneflow")


@contextmanager
def process_state_restored() -> Iterator[None]:
    """Restore `os.environ`, `sys.exit` and `sys.excepthook` at the end of the block: both packages change them."""
    variables, exit_function, hook = dict(os.environ), sys.exit, sys.excepthook
    try:
        yield
    finally:
        sys.exit, sys.excepthook = exit_function, hook
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
