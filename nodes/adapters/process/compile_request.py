"""One compile node's decisions about a module, made once. Everything below the node reads them from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....compile_cache.backends import registry
from ....compile_cache.backends.base import Backend, Capabilities
from ....compile_cache.keys import Role
from ..comfyui import latent_cells


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """chosen: the node's backend input, one of `registry.CHOICES`. device: the type of device that the node expects the
    module to run on ("cuda"). backend, capabilities, why: the choice resolved for `device`, and a sentence to explain
    it. label: the model's name, for people. file: of the model, or empty. left_out: kinds or paths of blocks that stay
    eager. cell: pixels per side of a latent cell, for people.
    """

    chosen: str
    device: str
    backend: Backend
    capabilities: Capabilities
    why: str
    role: Role
    node_id: str | None = None
    label: str = ""
    file: str = ""
    left_out: tuple[str, ...] = ()
    cell: int = latent_cells.DEFAULT

    @classmethod
    def resolved(cls, chosen: str, device: str, role: Role, **settings: Any) -> CompileRequest:
        """Find the backend for a choice, without waiting for one that starts: the import of inductor takes seconds.

        Raises UnknownBackendError or BackendUnavailableError.
        """
        return cls(chosen, device, *registry.resolve(chosen, device, waits=False), role, **settings)

    def backend_on(self, device: str) -> tuple[Backend, Capabilities]:
        """The backend for a type of device, once it has started. Raises BackendUnavailableError."""
        backend, capabilities, _ = registry.resolve(self.chosen, device)
        return backend, capabilities
