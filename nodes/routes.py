"""HTTP: `GET /resolute/cache` and `GET /resolute/events`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from aiohttp import web
from server import PromptServer

from .adapters import service

_registered = False


def register() -> None:
    """Add the routes once; ComfyUI serves them at /resolute/... and /api/resolute/..."""
    global _registered
    server = getattr(PromptServer, "instance", None)
    if _registered or server is None:
        return
    server.routes.get("/resolute/cache")(_cache)
    server.routes.get("/resolute/events")(_events)
    _registered = True


async def _cache(request: web.Request) -> web.Response:
    return web.json_response(service.report())


async def _events(request: web.Request) -> web.Response:
    events: list[dict[str, Any]] = [asdict(event) for event in service.cache().stats.events]
    return web.json_response({"events": events})
