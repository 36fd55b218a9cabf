"""The router of this process, for `GET /resolute/fleet` and the headers of an answer.

Serve copies the router's module by value into each process, so a variable of that module would be another one there.
This module is imported by name, so it is the same for the router and for the ingress.
"""

from __future__ import annotations

from typing import Any, Protocol


class HasState(Protocol):
    """The interface of a router that the ingress uses."""

    decisions: dict[str, dict[str, Any]]

    def state(self) -> list[dict[str, Any]]: ...


_router: HasState | None = None


def set_router(router: HasState) -> None:
    """Called by the router when Serve makes it, at the first call of a replica."""
    global _router
    _router = router


def decision(prompt_id: str) -> dict[str, Any]:
    """`replica` and `why` of a prompt; empty if no router of ours chose."""
    return _router.decisions.get(prompt_id, {}) if _router is not None else {}


def decisions() -> list[dict[str, Any]]:
    """The latest, oldest first."""
    return list(_router.decisions.values()) if _router is not None else []


def replicas() -> list[dict[str, Any]]:
    """Each replica with its load and its report; empty with a router of Serve's."""
    return _router.state() if _router is not None else []
