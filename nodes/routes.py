"""HTTP: what the cache holds and did, and prompts that warm it up or empty it.

GET  /resolute/cache     counters, captures, and how far each remembered shape is ready
GET  /resolute/events    the latest events
POST /resolute/warm-up   {"prompt": a workflow in API form} or {"plan": see `warm_up.request`}: warms what it reaches
POST /resolute/free      frees every capture, as soon as no prompt runs

What changes anything is queued as a prompt: nothing is taken from a run in flight.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from aiohttp import web
from server import PromptServer

from ..compile_cache.errors import UserError
from .adapters.comfyui.prompt_queue import queue
from .adapters.process import runtime
from .adapters.report import cache_report
from .adapters.restart import preload
from .adapters.warm_up.request import Wanted, wanted

_FREE = {
    "free": {"class_type": "ResoluteFree", "inputs": {"any": "resolute"}},
    "report": {"class_type": "ResoluteReport", "inputs": {"any": ["free", 0]}},
}
_registered = False


def register() -> None:
    """Add the routes once; ComfyUI serves them at /resolute/... and /api/resolute/..."""
    global _registered
    server = getattr(PromptServer, "instance", None)
    if _registered or server is None:
        return
    preload.begin(server)
    server.routes.get("/resolute/cache")(_cache)
    server.routes.get("/resolute/events")(_events)
    server.routes.post("/resolute/warm-up")(_warm_up)
    server.routes.post("/resolute/free")(_free)
    _registered = True


async def _cache(request: web.Request) -> web.Response:
    return _told(cache_report.report)


async def _events(request: web.Request) -> web.Response:
    return _told(lambda: {"events": [asdict(event) for event in runtime.cache().stats.events]})


def _told(read: Callable[[], dict[str, Any]]) -> web.Response:
    try:
        return web.json_response(read())
    except UserError as error:  # a setting of this server's
        return _refused(error, status=500)


async def _warm_up(request: web.Request) -> web.Response:
    try:
        body = await _body(request)
        found: Wanted = await asyncio.to_thread(wanted, body)
    except UserError as error:
        return _refused(error)
    answer = await queue(PromptServer.instance, found.prompt, request, **_sender(body))
    if answer.status != 200:
        return answer
    queued = json.loads(answer.text or "{}")
    return web.json_response({**queued, "items": found.items, "unknown": found.unknown})


async def _free(request: web.Request) -> web.Response:
    try:
        body = await _body(request) if request.can_read_body else {}
    except UserError as error:
        return _refused(error)
    return await queue(PromptServer.instance, copy.deepcopy(_FREE), request, front=True, **_sender(body))


def _refused(error: UserError, status: int = 400) -> web.Response:
    return web.json_response({"error": {"type": "resolute", "message": str(error)}}, status=status)


async def _body(request: web.Request) -> Mapping[str, Any]:
    """Raises UserError for what is no JSON object."""
    try:
        body = await request.json()
    except (ValueError, RecursionError):
        raise UserError("The request is not JSON, or nested too deeply.") from None
    if not isinstance(body, dict):
        raise UserError("The request is not a JSON object.")
    return body


def _sender(body: Mapping[str, Any]) -> dict[str, Any]:
    return {"client_id": body["client_id"]} if isinstance(body.get("client_id"), str) else {}
