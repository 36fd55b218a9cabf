"""One headless ComfyUI on the loopback, with folders of its own, which ends when the replica does."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import aiohttp

from ..errors import ServerError
from ..ports import free_port
from .config import FleetConfig
from .parent_death import end_with_parent

_READY_SECONDS = 300.0
_STOP_SECONDS = 10.0
_PORTS = 3  # another program may take a free port before ComfyUI does
_TAIL = 30  # lines of the log in an error


class ComfyUIProcess:
    """Starts ComfyUI, waits until it answers, and stops it.

    The replicas share the input folder and the store of compiled regions. Output, temporary and user folders are the
    replica's own: each ComfyUI numbers its files from 1.
    """

    def __init__(self, config: FleetConfig, folder: Path) -> None:
        """folder: of this replica; made if it is missing."""
        self._config, self._folder = config, folder
        self._process: asyncio.subprocess.Process | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """0 if it does not run."""
        return self._process.pid if self._process is not None and self._process.returncode is None else 0

    async def start(self) -> None:
        """Start it on a free port and wait until it answers. Raises ServerError with the end of its log."""
        for name in ("output", "temp", "user"):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        for name in ("input", "regions"):
            _make(self._config.folder / name)
        for attempt in range(_PORTS):
            self.port = free_port()
            with open(self._log, "ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *self.command(),
                    cwd=self._config.comfyui,
                    env=self._environment(),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=asyncio.subprocess.STDOUT,
                    preexec_fn=end_with_parent if sys.platform == "linux" else None,
                )
            try:
                await self._wait_until_ready()
                return
            except ServerError as error:
                await self.stop()
                if attempt + 1 == _PORTS or "address already in use" not in str(error).lower():
                    raise

    async def wait(self) -> int:
        """Wait for its end, and return its exit code."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """Stop it, if it runs: first with SIGTERM."""
        if not self.pid or self._process is None:
            return
        self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_SECONDS)
        except asyncio.TimeoutError:
            self._process.kill()
            await self._process.wait()

    def kill(self) -> None:
        """End it at once, outside of the event loop."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)

    def command(self) -> list[str]:
        """The command line. The configured arguments come last, so they win."""
        folders = {"output": self._folder, "temp": self._folder, "user": self._folder, "input": self._config.folder}
        named = [text for name, where in folders.items() for text in (f"--{name}-directory", str(where / name))]
        return [
            str(self._config.python), "main.py", "--listen", "127.0.0.1", "--port", str(self.port), *named,
            "--database-url", "sqlite:///:memory:", "--disable-auto-launch", *self._config.arguments,
        ]  # fmt: skip

    def log_tail(self) -> str:
        """The last lines that it wrote."""
        if not self._log.is_file():
            return ""
        return "\n".join(self._log.read_text("utf-8", "replace").splitlines()[-_TAIL:])

    @property
    def _log(self) -> Path:
        return self._folder / "comfyui.log"

    def _environment(self) -> dict[str, str]:
        # The actor's Python paths are wrong for this interpreter, and custom nodes need no token of Ray.
        left_out = ("PYTHONPATH", "PYTHONHOME", "RAY_AUTH_TOKEN")
        inherited = {name: text for name, text in os.environ.items() if name not in left_out}
        store = {"RESOLUTE_STORE": str(self._config.folder / "regions"), "PYTHONUNBUFFERED": "1"}
        return {**inherited, **store, **self._config.environment}

    async def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while time.monotonic() < deadline:
                if not self.pid:
                    raise ServerError(f"ComfyUI ended before it was ready. The end of {self._log}:\n{self.log_tail()}")
                try:
                    async with session.get(f"{self.url}/system_stats") as answer:
                        if answer.status == 200:
                            return
                except (aiohttp.ClientError, asyncio.TimeoutError):
                    pass  # not yet
                await asyncio.sleep(0.2)
        raise ServerError(f"ComfyUI was not ready after {_READY_SECONDS:.0f} s. {self._log}:\n{self.log_tail()}")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ServerError(f"The fleet's folder {folder} cannot be made: {error.strerror or error}.") from None
