"""Backends by name, and what `auto` means on a device."""

from __future__ import annotations

import threading

from ..errors import BackendUnavailableError, UnknownBackendError
from .base import Backend, Capabilities

AUTO = "auto"
_AUTO_ORDER = ("inductor", "cudagraph", "eager")
NAMES = ("inductor", "cudagraph", "oneflow", "eager")
CHOICES = (AUTO, *NAMES)

_lock = threading.Lock()  # regions are loaded ahead in a thread of their own
_instances: dict[str, Backend] = {}


def get(name: str) -> Backend:
    """The one instance of a backend. Its module is imported here, at first use. Raises UnknownBackendError."""
    with _lock:
        if name not in _instances:
            _instances[name] = _made(name)
        return _instances[name]


def _made(name: str) -> Backend:
    if name == "inductor":
        from .inductor.backend import InductorBackend

        return InductorBackend()
    if name == "cudagraph":
        from .cudagraph import CudaGraphBackend

        return CudaGraphBackend()
    if name == "oneflow":
        from .oneflow.backend import OneFlowBackend

        return OneFlowBackend()
    if name == "eager":
        from .eager import EagerBackend

        return EagerBackend()
    raise UnknownBackendError(name, list(CHOICES))


def resolve(name: str, device: str) -> tuple[Backend, Capabilities, str]:
    """The backend for `name` on a type of device, with a sentence that says why it was chosen.

    A backend that was asked for by name and cannot run raises BackendUnavailableError: it is never replaced silently.
    """
    if name != AUTO:
        backend = get(name)
        capabilities = backend.probe(device)
        if not capabilities.available:
            raise BackendUnavailableError(name, capabilities.reason, capabilities.remedy)
        detail = f" ({capabilities.detail})" if capabilities.detail else ""
        return backend, capabilities, f"{name}, as chosen{detail}"
    refused: list[str] = []
    for candidate in _AUTO_ORDER:
        backend = get(candidate)
        capabilities = backend.probe(device)
        if capabilities.available:
            why = f"{candidate} ({'; '.join(refused)})" if refused else candidate
            return backend, capabilities, why
        refused.append(f"not {candidate}: {capabilities.reason}")
    raise AssertionError("eager runs everywhere")
