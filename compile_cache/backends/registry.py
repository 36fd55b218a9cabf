"""The table of backends, and the choice of `auto` on a device."""

from __future__ import annotations

import importlib
import threading
from typing import NamedTuple

from ..errors import BackendUnavailableError, UnknownBackendError
from .base import Backend, Capabilities


class _Entry(NamedTuple):
    name: str
    module: str  # relative to this package, imported at the first use
    kind: str  # the name of the Backend subclass in it
    in_auto: bool = False  # whether `auto` may choose it


# One line for each backend, in the order of the node's choices. `auto` chooses the first one that is available.
_TABLE = (
    _Entry("inductor", ".inductor.backend", "InductorBackend", in_auto=True),
    _Entry("cudagraph", ".cudagraph", "CudaGraphBackend", in_auto=True),
    _Entry("oneflow", ".oneflow.backend", "OneFlowBackend"),
    _Entry("eager", ".eager", "EagerBackend", in_auto=True),
)
_ENTRIES = {entry.name: entry for entry in _TABLE}

AUTO = "auto"
NAMES = tuple(_ENTRIES)
CHOICES = (AUTO, *NAMES)

_lock = threading.Lock()  # the thread that preloads regions calls `get` too
_instances: dict[str, Backend] = {}


def get(name: str) -> Backend:
    """The single instance of a backend, created at its first use. Raises UnknownBackendError."""
    with _lock:
        if name not in _instances:
            _instances[name] = _make(name)
        return _instances[name]


def _make(name: str) -> Backend:
    entry = _ENTRIES.get(name)
    if entry is None:
        raise UnknownBackendError(name, list(CHOICES))
    backend: Backend = getattr(importlib.import_module(entry.module, __package__), entry.kind)()
    return backend


def candidates(name: str) -> list[Backend]:
    """The backends that `resolve` may return for `name`, on any device. Raises UnknownBackendError."""
    return [get(entry.name) for entry in _TABLE if entry.in_auto] if name == AUTO else [get(name)]


def resolve(name: str, device: str, waits: bool = True) -> tuple[Backend, Capabilities, str]:
    """The backend for `name` (one of CHOICES) on a device type ("cuda", "cpu"), its capabilities, and why, as text.

    A backend chosen by name is never replaced by another. waits: False takes `probe_at_once`, so a backend that starts
    may turn out to lack something. Raises UnknownBackendError, and BackendUnavailableError with the reason and the
    remedy if the chosen backend cannot run on that device.
    """
    refused: list[str] = []
    for backend in candidates(name):
        capabilities = backend.probe(device) if waits else backend.probe_at_once(device)
        if capabilities.available:
            how = backend.name if name == AUTO else f"{name}, as chosen"
            return backend, capabilities, how + _in_brackets(capabilities.detail, *refused)
        if name != AUTO:
            raise BackendUnavailableError(name, capabilities.reason, capabilities.remedy)
        refused.append(f"not {backend.name}: {capabilities.reason}")
    raise AssertionError("eager runs on every device")


def _in_brackets(*details: str) -> str:
    known = "; ".join(filter(None, details))
    return f" ({known})" if known else ""
