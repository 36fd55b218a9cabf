"""HTTP routes: read the cache's state, warm up, free captures. See docs/servers.md.

GET  /resolute/cache     counters, captures, and whether each remembered shape is ready
GET  /resolute/events    the latest events
GET  /resolute/runs      the latest sampling runs and decodes: work, seconds, and the reasons for waits
GET  /resolute/report    the report as text, which the panel copies for a bug report
GET  /resolute/texts     the latest text of each node, by workflow and node, for a page that is reloaded
GET  /resolute/settings  the settings that an environment variable overrides
POST /resolute/warm-up   {"prompt": a workflow in API form} or {"plan": ...}, see `warm_up.request.parse_request`
POST /resolute/measurements  the seconds of *Measure against stock*, see `stock_measurements.finish`
POST /resolute/free      frees every capture, now or when the running prompt ends

A warm-up is a prompt in the queue. Freeing waits for the running call. So no route disturbs a running prompt.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

from aiohttp import web
from server import PromptServer

import nodes

from ..compile_cache.errors import UserError
from .adapters.comfyui import messages
from .adapters.comfyui.prompt_queue import queue
from .adapters.patch import free_captures
from .adapters.process import preload, runtime, user_settings
from .adapters.report import cache_report, runs, stock_measurements
from .adapters.warm_up.request import parse_request
from .adapters.warm_up.request_limits import MAX_BODY, MAX_SMALL_BODY, RequestTooLargeError, parse_body


def register() -> None:
    """Add the routes, and schedule the preload of remembered regions from disk.

    ComfyUI serves each route at /resolute/... and at /api/resolute/...
    """
    server = getattr(PromptServer, "instance", None)
    if server is None:
        return
    preload.begin(server)
    server.routes.get("/resolute/cache")(_reads(cache_report.report))
    server.routes.get("/resolute/events")(_reads(lambda: {"events": [*map(asdict, runtime.cache().stats.events)]}))
    server.routes.get("/resolute/runs")(_reads(lambda: {"runs": runs.latest()}))
    server.routes.get("/resolute/report")(_reads(lambda: {"text": cache_report.text()}))
    server.routes.get("/resolute/texts")(_reads(messages.latest_texts))
    server.routes.get("/resolute/settings")(_reads(lambda: {"fixed": user_settings.fixed()}))
    server.routes.post("/resolute/warm-up")(_warm_up)
    server.routes.post("/resolute/free")(_free)
    server.routes.post("/resolute/measurements")(_measurements)


def _reads(read: Callable[[], dict[str, Any]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A handler that answers with the result of `read`, as JSON. A report just after a start waits for the import of
    inductor, so a thread reads it: the server answers others meanwhile.
    """

    async def answer(request: web.Request) -> web.Response:
        try:
            return web.json_response(await asyncio.to_thread(read))
        except UserError as error:  # an invalid setting of this server; the request is fine, hence 500
            return _error(error, status=500)

    return answer


async def _warm_up(request: web.Request) -> web.Response:
    try:
        body = await _body(request, MAX_BODY)
        parsed = await asyncio.to_thread(parse_request, body, nodes.NODE_CLASS_MAPPINGS)
    except UserError as error:
        return _error(error)
    client = {"client_id": body["client_id"]} if isinstance(body.get("client_id"), str) else {}
    answer = await queue(PromptServer.instance, parsed.prompt, request, **client)
    if answer.status != 200:
        return answer
    queued = json.loads(answer.text or "{}")
    return web.json_response({**queued, "unknown": parsed.unknown})


async def _free(request: web.Request) -> web.Response:
    try:
        if request.can_read_body:
            await _body(request, MAX_SMALL_BODY)
        # Off the event loop: a model call that compiles keeps the cache's lock for minutes.
        queue = PromptServer.instance.prompt_queue
        return web.json_response(await asyncio.to_thread(free_captures.free_or_wait, queue))
    except UserError as error:
        return _error(error)


async def _measurements(request: web.Request) -> web.Response:
    try:
        body = await _body(request, MAX_SMALL_BODY)
        found = await asyncio.to_thread(stock_measurements.finish, body)
    except UserError as error:
        return _error(error)
    return web.json_response({} if found is None else found.plain())


def _error(error: UserError, status: int = 400) -> web.Response:
    """An error response in the form of core's POST /prompt."""
    status = 413 if isinstance(error, RequestTooLargeError) else status
    text = {"type": "resolute", "message": str(error), "details": str(error), "extra_info": {}}
    return web.json_response({"error": text, "node_errors": {}}, status=status)


async def _body(request: web.Request, limit: int) -> Mapping[str, Any]:
    """The request's JSON. Raises UserError if it is not a JSON object of at most `limit` bytes, see request_limits."""
    content = bytearray()
    if (request.content_length or 0) > limit:
        raise RequestTooLargeError(limit)
    async for part in request.content.iter_any():  # a request without a length may send any amount
        content += part
        if len(content) > limit:
            raise RequestTooLargeError(limit)
    return await asyncio.to_thread(parse_body, bytes(content))
