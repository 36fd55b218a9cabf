"""The form of ComfyUI's HTTP API: its paths, answers and errors, and bodies up to a limit."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from .. import pack

_MAX_DEPTH = 100  # lists and objects inside each other in an answer; a request may have 64


class WithoutApi:
    """ComfyUI answers each route with /api before it too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and scope["path"].startswith("/api/"):
            path = scope["path"][len("/api") :]
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)


class ApiError(Exception):
    """An answer in the form of ComfyUI's own errors."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


class Answer(Response):
    """JSON that every client can read, whatever a record holds: no NaN, and no character that UTF-8 lacks."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_text(content).encode("ascii")


def json_text(content: Any) -> str:
    """As JSON in ASCII. Numbers that JSON lacks, and what is nested too deeply, become null."""
    try:
        return json.dumps(content, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(_sendable(content, _MAX_DEPTH), allow_nan=False)


def _sendable(value: Any, depth: int) -> Any:
    if isinstance(value, (dict, list, tuple)) and not depth:
        return None
    if isinstance(value, dict):
        return {name: _sendable(each, depth - 1) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_sendable(each, depth - 1) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


async def error_answer(request: Request, error: ApiError) -> Answer:
    """The response for an ApiError."""
    text = {"type": error.kind, "message": str(error), "details": str(error), "extra_info": {}}
    return Answer({"error": text, "node_errors": {}}, error.status)


async def query_error_answer(request: Request, error: RequestValidationError) -> Answer:
    """The response for a query such as `max_items=x`."""
    said = "; ".join(f"{each['loc'][-1]}: {each['msg']}" for each in error.errors())
    return await error_answer(request, ApiError(400, "invalid_query", f"The query cannot be used. {said}."))


async def json_body(request: Request, limit_mb: int) -> dict[str, Any]:
    """The body as a JSON object, empty for none, within the limits of the pack's own routes. Raises ApiError."""
    content = await limited_body(request, limit_mb)
    limits = pack.module("nodes.adapters.warm_up.request_limits")
    try:
        body: dict[str, Any] = await asyncio.to_thread(limits.parse_body, content) if content.strip() else {}
    except pack.module("compile_cache.errors").UserError as error:
        raise ApiError(400, "invalid_json", str(error)) from None
    return body


async def limited_body(request: Request, limit_mb: int) -> bytes:
    """The body. Raises ApiError above the limit."""
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > limit_mb * 1024 * 1024:
            raise ApiError(413, "too_large", f"The body is larger than {limit_mb} MB (body_mb).")
    request._body = bytes(content)  # what Request.body() would have kept, for form()
    return bytes(content)
