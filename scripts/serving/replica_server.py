"""The ComfyUI of a replica: on the loopback, with folders of its own, and it ends when the replica does."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from ..server.process import ComfyServer
from .config import FleetConfig
from .parent_death import end_with_parent

_OF_RAY = ("RAY_AUTH_TOKEN",)  # custom nodes need no token of Ray's


class ReplicaServer(ComfyServer):
    """The replicas share the input folder and the store of compiled regions. Output, temporary and user folders are the
    replica's own: each ComfyUI numbers its files from 1. The configured arguments come last, so they win.
    """

    before_exec = staticmethod(end_with_parent) if sys.platform == "linux" else None

    def __init__(self, config: FleetConfig, folder: Path) -> None:
        """folder: of this replica; made if it is missing."""
        shared = {name: config.folder / name for name in ("input", "regions")}
        self._folders = {**{name: folder / name for name in ("output", "temp", "user")}, **shared}
        environment = {**dict.fromkeys(_OF_RAY), "RESOLUTE_STORE": str(shared["regions"]), **config.environment}
        arguments = ["--disable-auto-launch", *config.arguments]
        super().__init__(
            config.python, config.comfyui, folder, cpu=False, arguments=arguments, environment=environment,
            ready_timeout=300.0,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """0 if it does not run."""
        return self.process.pid if self.process is not None and self.process.poll() is None else 0

    async def start_beside(self) -> None:
        """As `start`, and the event loop goes on. Raises ServerError with the end of its log."""
        self.begin()  # on this thread: Linux ends the process with the thread that made it
        await asyncio.to_thread(self.wait_until_ready)

    async def wait(self) -> None:
        """Wait for its end."""
        while self.pid:
            await asyncio.sleep(0.2)

    def kill(self) -> None:
        """End it at once."""
        if self.process is not None:
            self.process.kill()

    def folder_arguments(self) -> list[str]:
        named = [(name, folder) for name, folder in self._folders.items() if name != "regions"]
        return [text for name, folder in named for text in (f"--{name}-directory", str(folder))]

    def prepare_folders(self) -> None:
        for folder in self._folders.values():
            folder.mkdir(parents=True, exist_ok=True)
