"""Queue a prompt through ComfyUI's own handler of `POST /prompt`, so that it is checked and run like any other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

Prompt = Mapping[str, Mapping[str, Any]]


class _Posted:
    """The parts of a request that core's handler reads."""

    def __init__(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        self.headers = headers
        self._body = dict(body)

    async def json(self) -> dict[str, Any]:
        return self._body


async def queue(server: Any, prompt: Prompt, request: web.Request, **more: Any) -> web.Response:
    """Queue `prompt` and return core's answer: 200 with `prompt_id`, or 400 with the errors of the prompt.

    server: ComfyUI's PromptServer. request: the request behind this prompt; its headers are passed on. more: further
    fields of the body, such as `client_id` and `front`. Raises HTTPNotImplemented if the server has no such route.
    """
    for route in server.routes:
        if getattr(route, "path", None) == "/prompt" and route.method == "POST":
            answer: web.Response = await route.handler(_Posted({"prompt": dict(prompt), **more}, request.headers))
            return answer
    raise web.HTTPNotImplemented(text="This ComfyUI has no POST /prompt.")
