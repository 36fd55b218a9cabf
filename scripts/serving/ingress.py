"""The deployment that clients talk to: ComfyUI's own HTTP API and websocket, in front of all replicas."""

# `serve.ingress` pickles the class at its definition, so what its methods use must be defined above it.
# No `from __future__ import annotations`: Serve rewrites the methods' signatures, and FastAPI then cannot read texts.
import asyncio
import logging
import math
import os
import re
import sqlite3
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request, Response, WebSocket, WebSocketDisconnect
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse
from ray import serve
from starlette.datastructures import UploadFile

from . import config as settings
from . import current_router, origins
from .background import Background
from .fields import checked_id, field, is_id, prompt_body, texts
from .files import Files, RefusedError, content_type
from .http_form import (
    Answer,
    ApiError,
    WithoutApi,
    error_answer,
    json_body,
    json_text,
    limited_body,
    query_error_answer,
)
from .need import need_of
from .prompts import Prompts
from .records import Record, Records
from .warm_ups import WarmUps

logger = logging.getLogger("ray.serve")

_CHECK_SECONDS = 2.0  # for a replica to check a prompt; in a longer queue the client learns of errors from the history
_BACKLOG = 1024  # messages for a slow websocket; then previews and progress are dropped
_FETCHED = re.compile(r"(object_info|models)(/[^/]+)?|embeddings|features|extensions|system_stats")

app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
app.add_middleware(WithoutApi)
app.add_middleware(origins.Origins)  # the last one stands in front
app.add_exception_handler(ApiError, error_answer)
app.add_exception_handler(RequestValidationError, query_error_answer)


async def _write(socket: WebSocket, inbox: asyncio.Queue[Any]) -> None:
    while True:
        message = await inbox.get()
        if isinstance(message, bytes):
            await socket.send_bytes(message)
        else:
            await socket.send_text(json_text(message))


async def _first_call(handle: Any) -> None:
    await handle.fetch.remote("/features", need={})


@serve.ingress(app)
class Ingress:
    """Holds prompt ids, websockets and the history. One process: see docs/fleet.md for what that limits."""

    def __init__(self, plain: Mapping[str, Any], replicas: Any) -> None:
        self._config = settings.from_plain(plain)
        origins.allow(self._config.enable_cors_header)
        self._handle = replicas
        self._records = Records(self._config.folder / "ingress" / "prompts.sqlite")
        self._files = Files(self._config.folder / "ingress")
        self._files.empty("temp")
        self._uploads = Files(self._config.folder)  # its folder `input` is that of every replica
        self._sockets: dict[str, asyncio.Queue[Any]] = {}
        self._number = self._records.next_number()
        self._prompts = Prompts(self._config, replicas, self._records, self._files, self._send)
        self._background = Background()
        self._warm_ups = WarmUps(replicas, self._prompts.needs, self._background)
        self._is_resumed = False

    async def reconfigure(self, _: Any) -> None:
        """Serve calls it once after a start: begin anew what the last ingress left unfinished."""
        if not self._is_resumed:
            self._is_resumed = True
            # Serve makes the router at the first call, and /ready asks it.
            self._background.start(_first_call(self._handle))
            for record in self._records.unfinished():
                logger.warning("prompt %s was not over when the ingress ended, and starts again", record.prompt_id)
                try:
                    resumed = self._prompts.start(record)
                    resumed.first.set_result((200, {"node_errors": {}}))  # its client was told so
                except Exception:  # the other prompts, and the fleet, go on
                    logger.exception("prompt %s cannot start again and is skipped", record.prompt_id)

    @app.post("/prompt")
    async def post_prompt(self, request: Request) -> Response:
        body = prompt_body(await json_body(request, self._config.body_mb))
        prompt_id = checked_id(body.pop("prompt_id", None))
        number = float(body.get("number", self._number))
        self._number += 1
        record = Record(prompt_id, number, body)
        try:
            is_new = self._records.add(record)
        except sqlite3.Error as error:
            raise ApiError(507, "no_space", f"The fleet cannot keep the prompt: {error}.") from None
        if not is_new:
            raise ApiError(400, "prompt_id_used", f"The prompt_id {prompt_id} was used before. Choose another one.")
        prompt = self._prompts.start(record)
        try:
            status, answer = await asyncio.wait_for(asyncio.shield(prompt.first), _CHECK_SECONDS)
        except asyncio.TimeoutError:
            status, answer = 200, {"node_errors": {}}
            if not prompt.first.done():
                prompt.first.set_result((200, answer))
        found = {"prompt_id": prompt_id, "number": number} if status == 200 else {}
        headers = {"X-Resolute-Replica": prompt.replica, "X-Resolute-Why": prompt.why}
        return Answer({**found, **answer}, status, {name: text for name, text in headers.items() if text})

    @app.get("/prompt")
    async def get_prompt(self) -> Response:
        return Answer({"exec_info": {"queue_remaining": len(self._prompts.open)}})

    @app.get("/queue")
    async def get_queue(self) -> Response:
        found: dict[str, list[Any]] = {"queue_running": [], "queue_pending": []}
        for each in list(self._prompts.open.values()):
            line = [each.record.number, each.record.prompt_id, each.record.body["prompt"], each.extra, []]
            found["queue_running" if each.is_running else "queue_pending"].append(line)
        return Answer(found)

    @app.post("/queue")
    async def post_queue(self, request: Request) -> Response:
        body = await json_body(request, self._config.body_mb)
        is_cleared, named = field(body, "clear", bool), set(texts(body, "delete") or ())
        for each in list(self._prompts.open.values()):
            if not each.is_running and (is_cleared or each.record.prompt_id in named):
                self._prompts.interrupt(each.record.prompt_id)
        return Response()

    @app.post("/interrupt")
    async def interrupt(self, request: Request) -> Response:
        named = field(await json_body(request, self._config.body_mb), "prompt_id", str)
        for each in list(self._prompts.open.values()):
            if each.is_running and named in (None, each.record.prompt_id):
                self._prompts.interrupt(each.record.prompt_id)
        return Response()

    @app.get("/history")
    async def get_history(self, max_items: int = 10_000) -> Response:
        return Answer(self._records.history(count=max(-1, min(max_items, 10_000))))

    @app.get("/history/{prompt_id}")
    async def get_history_of(self, prompt_id: str) -> Response:
        return Answer(self._records.history(prompt_id))

    @app.post("/history")
    async def post_history(self, request: Request) -> Response:
        body = await json_body(request, self._config.body_mb)
        is_cleared, named = field(body, "clear", bool), texts(body, "delete") or []
        for prompt_id in [None] if is_cleared else filter(is_id, named):
            self._records.hide(prompt_id)
        return Response()

    @app.get("/view")
    async def view(self, filename: str = "", subfolder: str = "", type: str = "output") -> Response:
        try:
            path = (self._uploads if type == "input" else self._files).path(type, subfolder, filename)
            is_there = path.is_file()
        except (RefusedError, OSError) as error:
            raise ApiError(400, "invalid_filename", str(error)) from None
        if not is_there:
            raise ApiError(404, "not_found", f"There is no file {filename!r} in {subfolder or type!r}.")
        shown: dict[str, Any] = {"media_type": content_type(path), "content_disposition_type": "inline"}
        return FileResponse(path, filename=path.name, headers={"X-Content-Type-Options": "nosniff"}, **shown)

    @app.post("/upload/image")
    async def upload(self, request: Request) -> Response:
        await limited_body(request, self._config.body_mb)
        async with request.form() as form:
            image, kind = form.get("image"), form.get("type") or "input"
            subfolder, overwrite = form.get("subfolder") or "", form.get("overwrite") or ""
            is_named = isinstance(image, UploadFile) and image.filename and isinstance(subfolder, str)
            if not is_named or kind != "input":
                raise ApiError(400, "invalid_upload", "An upload needs the file `image`, and goes to the type `input`.")
            is_overwritten = str(overwrite).lower() in ("1", "true")
            try:
                # No await between the look for a free name and the write, so two uploads cannot take one name.
                name = self._uploads.upload(kind, subfolder, image.filename, await image.read(), is_overwritten)
            except RefusedError as error:
                raise ApiError(400, "invalid_upload", str(error)) from None
            except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
                raise ApiError(400, "invalid_upload", f"The upload cannot have this name: {error.strerror}.") from None
            except OSError as error:
                raise ApiError(507, "no_space", f"The upload cannot be kept: {error.strerror or error}.") from None
        return Answer({"name": name, "subfolder": subfolder, "type": kind})

    @app.websocket("/ws")
    async def websocket(self, socket: WebSocket) -> None:
        await socket.accept()
        client = socket.query_params.get("clientId") or uuid.uuid4().hex
        inbox = self._sockets[client] = asyncio.Queue(_BACKLOG)
        info = {"exec_info": {"queue_remaining": len(self._prompts.open)}}
        inbox.put_nowait({"type": "status", "data": {"status": info, "sid": client}})
        writer = asyncio.create_task(_write(socket, inbox))
        try:
            while True:
                await socket.receive()
        except (WebSocketDisconnect, RuntimeError):  # RuntimeError: it was closed already
            pass
        finally:
            writer.cancel()
            if self._sockets.get(client) is inbox:  # a client that reconnects replaces its old socket
                del self._sockets[client]

    @app.get("/ready")
    async def ready(self) -> Response:
        count = sum(bool(each.get("ready")) for each in current_router.replicas())
        return Answer({"ready": count}, 200 if count else 503)

    @app.get("/resolute/fleet")
    async def fleet(self) -> Response:
        return Answer(
            {
                "replicas": current_router.replicas(),
                "waiting": sum(not each.replica for each in self._prompts.open.values()),
                "open": len(self._prompts.open),
                "decisions": current_router.decisions(),
                "prompts": self._prompts.reports,
                "warming": self._warm_ups.states,
                "pid": os.getpid(),
            }
        )

    @app.post("/resolute/warm-up")
    async def warm_up(self, request: Request) -> Response:
        """Warm a workflow up on all replicas, or on as many as its share of the traffic needs."""
        body = await json_body(request, self._config.body_mb)
        wanted, need = body.pop("replicas", "all"), need_of(body.get("prompt"), self._uploads.image_size)
        names = [each["replica"] for each in sorted(current_router.replicas(), key=lambda each: each["load"])]
        if wanted == "share":
            wanted = math.ceil(self._records.share(" | ".join(need.shapes)) * len(names)) or 1
        if wanted != "all" and (not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1):
            raise ApiError(400, "resolute", f'"replicas" must be "all", "share" or a number, not {wanted!r}.')
        chosen = names if wanted == "all" else names[:wanted]
        if not chosen:
            raise ApiError(503, "resolute", "No replica is ready yet.")
        answers = await asyncio.gather(*(self._warm_ups.start(name, body, need) for name in chosen))
        refused = next((answer for answer in answers if "error" in answer), None)
        return Answer(refused or {"replicas": dict(zip(chosen, answers, strict=True))}, 400 if refused else 200)

    @app.get("/{path:path}")
    async def fetch(self, path: str) -> Response:
        """Any replica answers, because all of them give the same answer."""
        parts = path.split("/")
        if "." in parts or ".." in parts or re.search(r"[%?\0]", path):
            raise ApiError(400, "invalid_path", "A part of a path may not be . or .., and has no %, ? or NUL.")
        if not _FETCHED.fullmatch(path):
            raise ApiError(404, "not_found", f"The fleet has no GET /{path}.")
        status, answer = await self._handle.fetch.remote(f"/{quote(path)}", need={})
        return Answer(answer, status)

    def _send(self, client: str, message: dict[str, Any] | bytes) -> None:
        inboxes = [self._sockets[client]] if client in self._sockets else []
        for inbox in list(self._sockets.values()) if not client else inboxes:
            if inbox.qsize() < _BACKLOG - 64 or (isinstance(message, dict) and message["type"] != "progress"):
                if inbox.full():
                    inbox.get_nowait()
                inbox.put_nowait(message)
