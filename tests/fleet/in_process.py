"""The ingress as an ASGI application in this process: no Ray, no port, and a replica that draws by arithmetic."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest
from ray import serve

from scripts.serving import current_router, origins
from scripts.serving.ingress import Ingress

PLACE = {"subfolder": "r", "type": "output"}


def drawing(seed: int = 1) -> dict[str, Any]:
    """A workflow that the replica can draw."""
    return {"draw": {"class_type": "Draw", "inputs": {"seed": seed}}}


def picture(prompt: Any) -> bytes:
    """The bytes that the replica draws for a workflow."""
    return hashlib.sha256(json.dumps(prompt, sort_keys=True).encode()).digest()


class Replica:
    """A handle of replicas and a router. Its ComfyUI raises for fields of a wrong type where core does."""

    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.meta: dict[str, Any] = {}  # of each entry
        self.bodies: list[dict[str, Any]] = []
        self.decisions: dict[str, dict[str, Any]] = {}

    def state(self) -> list[dict[str, Any]]:
        return [{"replica": "r", "load": 0, "ready": True}]

    def options(self, **_: Any) -> Replica:
        return self

    @property
    def run(self) -> Any:
        return SimpleNamespace(remote=lambda body, **named: _Call(self._answers(body, **named)))

    @property
    def fetch(self) -> Any:
        async def remote(path: str, *, need: Mapping[str, Any]) -> tuple[int, Any]:
            self.fetched.append(path)
            return 200, {"path": path}

        return SimpleNamespace(remote=remote)

    async def _answers(
        self, body: Mapping[str, Any], *, need: Any, token: str, path: str = "/prompt"
    ) -> AsyncIterator[Any]:
        body = json.loads(json.dumps({**body, "prompt_id": token, "client_id": "the replica's"}))
        self.bodies.append(body)
        try:
            status, answer, extra = _queued(body)
        except (TypeError, ValueError, AttributeError, KeyError) as error:  # core's answer is a 500
            yield "refused", 500, {"error": {"type": "core", "message": repr(error), "details": ""}}
            return
        if status != 200:
            yield "refused", status, answer
            return
        prompt = body["prompt"]
        yield "accepted", "r", answer
        yield "message", "execution_start", {"prompt_id": token}
        yield "binary", b"preview"
        name = {**PLACE, "filename": f"{token}.png"}
        yield "file", name, picture(prompt), True
        output = {"draw": {"images": [name]}}
        yield "message", "executed", {"prompt_id": token, "output": output["draw"]}
        entry = {"prompt": [0, token, prompt, extra, ["draw"]], "outputs": output, "status": {"status_str": "success"}}
        yield "entry", {**entry, "meta": self.meta}
        yield "report", {"structures": [], "runs": 1}


class _Call:
    def __init__(self, answers: AsyncIterator[Any]) -> None:
        self._answers = answers

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._answers

    def cancel(self) -> None:
        """As a call that ends before the replica sees it."""


def _queued(body: Any) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """As core's POST /prompt uses each field."""
    float(body.get("number", 0))
    targets, known = body.get("partial_execution_targets"), True
    for name, node in body["prompt"].items():
        known = known and {node.get("class_type"): True} == {"Draw": True} and (targets is None or name in targets)
        node.get("inputs", {}).items()
    extra = body.get("extra_data", {})
    extra["client_id"] = body["client_id"]
    if not known or not body["prompt"]:
        return 400, {"error": {"type": "invalid_prompt", "message": "no such node"}, "node_errors": {}}, {}
    return 200, {"prompt_id": body["prompt_id"], "node_errors": {}}, extra


class _Ingress(Ingress):  # type: ignore[misc,valid-type]
    def __del__(self) -> None:
        """Serve's own is awaited by Serve."""


@dataclass
class Reply:
    """An answer. error: what left the application."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    error: str = ""

    def json(self) -> Any:
        return json.loads(self.body)


class Site:
    """One ingress. Requests go straight to its application."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "main.py").write_text("")
        self.folder, self.replica = folder, Replica()
        self._settings = {"comfyui": str(folder), "folder": str(folder), **settings}

    async def start(self) -> Site:
        """As Serve starts it."""
        current_router.set_router(self.replica)
        self.ingress = _Ingress.__new__(_Ingress)
        await self.ingress.__init__(self._settings, self.replica)  # type: ignore[misc]
        await self.ingress.reconfigure({})
        return self

    async def idle(self) -> None:
        """Wait until no prompt is open, and fail if one stays."""
        while tasks := [each.task for each in self.ingress._prompts.open.values()]:
            await asyncio.wait_for(asyncio.gather(*tasks), 20)

    async def ask(self, method: str, path: str, body: Any = b"", query: str = "", **headers: str) -> Reply:
        """path: as in the request's first line. body: bytes, or what goes as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        incoming, reply = [{"type": "http.request", "body": content}], Reply()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = {name.decode(): text.decode("latin-1") for name, text in message["headers"]}
            else:
                reply.body += message.get("body", b"")

        async def receive() -> Any:
            return incoming.pop() if incoming else await asyncio.Event().wait()

        with self._serving():
            try:
                await self.ingress.app(self._scope("http", path, query, headers, method=method), receive, send)
            except Exception as error:  # noqa: BLE001 - a server answers 500 then
                reply.error = repr(error)
        return reply

    async def connect(self, query: str = "", **headers: str) -> list[Any]:
        """The messages of a websocket until the prompts are over; `websocket.close` first for a refusal."""
        got: list[Any] = []
        gone = asyncio.Event()
        incoming = [{"type": "websocket.connect"}]

        async def receive() -> Any:
            if incoming:
                return incoming.pop()
            await gone.wait()
            return {"type": "websocket.disconnect", "code": 1001}

        async def send(message: Any) -> None:
            got.append(message)

        with self._serving():
            scope = self._scope("websocket", "/ws", query, headers, subprotocols=[])
            task = asyncio.create_task(self.ingress.app(scope, receive, send))
            await asyncio.sleep(0.02)
            self._leave = (gone, task)
        return got

    async def disconnect(self) -> None:
        gone, task = self._leave
        gone.set()
        await task

    def _scope(self, kind: str, path: str, query: str, headers: Mapping[str, str], **more: Any) -> dict[str, Any]:
        given = {"host": "127.0.0.1:8188", **{name.replace("_", "-").lower(): text for name, text in headers.items()}}
        return {
            "type": kind, "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": "",
            "path": unquote(path), "raw_path": path.encode(), "query_string": query.encode(),
            "headers": [(name.encode(), text.encode("latin-1")) for name, text in given.items() if text],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8188), **more,
        }  # fmt: skip

    @contextlib.contextmanager
    def _serving(self) -> Iterator[None]:
        # Serve hands the class's methods their instance through this context.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(servable_object=self.ingress))
            yield


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Forget what an ingress left in modules. For tests that import it."""
    yield
    current_router._router = None
    origins.allow("")
