"""The servers of `benchmarks.run`: one that contenders share, or one for each of them."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import psutil

from compile_cache.config import default_budget
from scripts.places import ROOT
from scripts.server.process import ComfyServer
from scripts.setup import command

from . import gguf_file, rig
from .card_memory import GIB, Memory, settled_bytes, used_bytes
from .workloads import CONTENDERS, DEMO

PAUSE = 6.0  # seconds before the first prompt after a restart, as a browser needs to open the page
_STILL = 1.0  # seconds in which memory has to stay the same


class Servers:
    """The server that runs, which is kept while the next contender may use it too."""

    def __init__(self, setup: command.Setup, options: argparse.Namespace) -> None:
        self._setup, self._options = setup, options
        self._key: Any = None
        self._server: ComfyServer | None = None
        self._memory: Memory | None = None
        self._before = 0  # bytes of the device that were in use before the server

    def get(self, contender: str, free: float | None, is_own: bool) -> tuple[ComfyServer, Memory, int]:
        """The server for a contender, its memory, and the bytes that were in use before. is_own: a new one."""
        key = (free, contender if is_own else "")
        if self._server is None or is_own or key != self._key:
            self.close()
            self._start(contender, free, is_own)
            self._key = key
        assert self._server is not None and self._memory is not None
        return self._server, self._memory, self._before

    def _start(self, contender: str, free: float | None, is_own: bool) -> None:
        options = self._options
        caches = self.caches(contender)
        variables = {name: str(caches / name.lower()) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        is_stock = is_own and not CONTENDERS[contender].backend  # or the pack would load regions beside its prompts
        variables["RESOLUTE_STORE"] = "0" if is_stock else str(caches / "store")
        if free is not None:
            variables["RESOLUTE_BUDGET_MB"] = str(default_budget(int(free * GIB)) >> 20)
        variables |= gguf_file.python_path(options.packages)
        variables |= rig.variables(options.environment)
        packs = {DEMO: ROOT / "scripts" / "models" / "demo_model"} if DEMO in options.model else {}
        packs |= {"ComfyUI-GGUF": options.gguf_pack} if options.gguf_pack else {}
        self._before = used_bytes()
        self._server = rig.server(
            self._setup, options.folder / (contender if is_own else "shared"), options.argument, models=options.models,
            cpu=options.cpu, environment=variables, packs=packs,
        )  # fmt: skip
        self._server.__enter__()
        assert self._server.process is not None
        self._memory = Memory(psutil.Process(self._server.process.pid))
        if options.restart:
            time.sleep(0.0 if options.cpu else PAUSE)

    def caches(self, contender: str) -> Path:
        """The folder with what a contender compiled: one of its own, where restarts are compared."""
        folder: Path = self._options.folder
        return folder / f"caches-{contender}" if self._options.restart else folder / "caches"

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        if self._server is not None:
            (self._options.folder / f"{self._server.folder.name}.log").write_text(self._server.log(), "utf-8")
            self._server.__exit__(None, None, None)
        self._server = self._memory = None


def given_back(server: ComfyServer, before: int) -> dict[str, Any]:
    """GiB that the server still holds after ComfyUI's Unload and after its Free, on the device and in torch."""
    found: dict[str, Any] = {}
    for name, body in (("unload", {"unload_models": True}), ("free", {"unload_models": True, "free_memory": True})):
        server.client.post("/free", body)
        time.sleep(_STILL)
        found[f"after_{name}_gib"] = round((settled_bytes(_STILL)[0] - before) / GIB, 3)
        of_torch = server.client.get("/system_stats")["devices"][0]["torch_vram_total"]
        found[f"torch_after_{name}_gib"] = round(of_torch / GIB, 3)
    return found
