"""Other web sites: a page of one may not use the fleet through its reader's browser. The rule is ComfyUI's own.

The setting lives in this module, which the ingress's process imports by name, because Serve makes the application
with its middleware before it knows the settings.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .http_form import Answer

logger = logging.getLogger("ray.serve")

_REFUSED = (
    "A page of another web site sent this request. If that site may use the fleet, name it in the setting "
    "enable_cors_header."
)
_allowed = ""


def allow(origin: str) -> None:
    """Answer pages of this origin ("*": of any) and say so in each answer; "" refuses other sites."""
    global _allowed
    _allowed = origin


class Origins:
    """Stands in front of everything, websockets too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
        elif not _allowed and await _is_other_site(Headers(scope=scope)):
            await _refuse(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._app(scope, receive, send)
        else:
            answer = Response() if scope["method"] == "OPTIONS" else self._app
            await answer(scope, receive, _with_headers(send) if _allowed else send)


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    logger.warning("a request of another web site was refused: %r", scope["path"])
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": ""})  # before it was accepted: status 403
        return
    text = {"type": "other_site", "message": _REFUSED, "details": _REFUSED, "extra_info": {}}
    await Answer({"error": text, "node_errors": {}}, 403)(scope, receive, send)


def _with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = _allowed
            headers["Access-Control-Allow-Methods"] = "POST, GET, DELETE, PUT, OPTIONS, PATCH"
            headers["Access-Control-Allow-Headers"] = "Content-Type, Authorization"
            headers["Access-Control-Allow-Credentials"] = "true"
        await send(message)

    return sent


async def _is_other_site(headers: Headers) -> bool:
    if headers.get("sec-fetch-site") == "cross-site":
        return True
    host, origin = headers.get("host"), headers.get("origin")
    if not host or not origin or _is_same(host, origin):
        return False
    return await _is_loopback(host)


def _is_same(host: str, origin: str) -> bool:
    """ComfyUI's comparison: a port counts if both have one. The origin "null" of a page without a site is none."""
    try:
        asked, page = urlsplit(f"//{host.lower()}"), urlsplit(origin.lower())
        here = asked.hostname if page.port is None else asked.netloc
        there = page.hostname if asked.port is None else page.netloc
    except ValueError:
        return False
    return bool(here) and here == there


async def _is_loopback(host: str) -> bool:
    """True if the host leads to this machine alone. What cannot be read counts too, unknown names do not."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return True
    try:
        return _is_own(name)
    except ValueError:
        pass  # no address, so a name
    try:
        found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(_is_own(str(each[4][0])) for each in found)


def _is_own(text: str) -> bool:
    address = ipaddress.ip_address(text)
    mapped = getattr(address, "ipv4_mapped", None) or address  # ::ffff:127.0.0.1
    return bool(mapped.is_loopback or mapped.is_unspecified)  # a connection to 0.0.0.0 reaches the loopback
