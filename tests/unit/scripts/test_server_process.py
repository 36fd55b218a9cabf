"""A server is ready when it answers itself, not when another one answers on its port."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from scripts.errors import ServerError
from scripts.server import process
from scripts.server.process import ComfyServer


class _Sleeper(ComfyServer):
    def command(self) -> list[str]:
        return [sys.executable, "-c", "import time; time.sleep(60)", str(self.folder)]


class _Answering(HTTPServer):
    argv: list[str] = []


class _Stats(BaseHTTPRequestHandler):
    server: _Answering

    def do_GET(self) -> None:
        body = json.dumps({"system": {"argv": self.server.argv}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Answering]:
    """A server on the port of the next ComfyUI."""
    with _Answering(("127.0.0.1", 0), _Stats) as server:
        monkeypatch.setattr(process, "free_port", lambda: server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_an_answer_of_another_server_does_not_count(answering: _Answering, tmp_path: Path) -> None:
    server = _Sleeper(Path(sys.executable), tmp_path, tmp_path, ready_timeout=0.5)
    port = ["main.py", "--port", str(answering.server_address[1])]
    answering.argv = [*port, "--base-directory", "of another server"]
    with pytest.raises(ServerError, match="was not ready"):
        server.start()
    assert server.process is None
    for answering.argv in [[*port, *server.folder_arguments(), "--more"], ["main.py"]]:  # the last: a pack changed them
        with server:
            assert server.process is not None
