"""The form of ComfyUI's HTTP API: its paths, errors and ids, and bodies up to a limit."""

from __future__ import annotations

import json
import uuid
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send


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


async def error_answer(request: Request, error: ApiError) -> JSONResponse:
    """The response for an ApiError."""
    text = {"type": error.kind, "message": str(error), "details": str(error), "extra_info": {}}
    return JSONResponse({"error": text, "node_errors": {}}, error.status)


def checked_id(given: Any) -> str:
    """The prompt id that a client gave, or a new one for None. Raises ApiError."""
    if given is None:
        return str(uuid.uuid4())
    try:
        if isinstance(given, str) and str(uuid.UUID(given)) == given:
            return given
    except ValueError:
        pass
    raise ApiError(400, "invalid_prompt_id", "prompt_id must be a valid UUID: lowercase, with hyphens.")


async def json_body(request: Request, limit_mb: int) -> dict[str, Any]:
    """The body as a JSON object, empty for none. Raises ApiError."""
    content = await limited_body(request, limit_mb)
    try:
        body = json.loads(content) if content.strip() else {}
    except (ValueError, RecursionError):
        raise ApiError(400, "invalid_json", "The body is not JSON.") from None
    if not isinstance(body, dict):
        raise ApiError(400, "invalid_json", "The body must be a JSON object.")
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
