"""A machine whose servers answer at once, for tests of benchmarks."""

from __future__ import annotations

import copy
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy

from scripts.errors import PromptError

_COUNTERS = (
    "region_compiles", "region_calls", "captures", "graph_calls", "replays", "eager_calls", "waiting_calls",
)  # fmt: skip


class Machine:
    """Its clock is moved by prompts and sleep. A forward takes 0.2 s, with our nodes 0.05 s and a replay; the first
    prompt of a size in a server takes `new_size` seconds more, and each prompt `each`; ours captures a model's size
    once. It is the server, its client and its process in one.
    """

    def __init__(self, new_size: float = 0.0, each: float = 0.0) -> None:
        self.started: list[tuple[str, dict[str, str]]] = []  # folders and variables
        self.prompts: list[dict[str, Any]] = []
        self.fails = ""  # a prompt with this in it fails
        self.clock = 100.0
        self.counted: dict[str, Any] = {**dict.fromkeys(_COUNTERS, 0), "stall_seconds": 0.0, "bypasses": {}}
        self.client = self.process = self
        self.pid = os.getpid()
        self.error = 0.0  # by which our latents differ
        self._new_size, self._each, self._seen, self._captured = new_size, each, set[str](), set[str]()

    def server(self, setup: Any, folder: Path, arguments: list[str], **settings: Any) -> Machine:
        self.started.append((folder.name, settings["environment"]))
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        return self

    @property
    def asked(self) -> list[str]:
        """Whose prompts came, in their order."""
        return ["resolute" if "ResoluteCompile" in str(nodes) else "stock" for nodes in self.prompts]

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def monotonic(self) -> float:
        return self.clock

    def time(self) -> float:
        return self.clock

    def sleep(self, seconds: float) -> None:
        self.clock += seconds

    def log(self) -> str:
        return "Device: a GPU\nother"

    def poll(self) -> None: ...

    def post(self, path: str, body: Any) -> None: ...

    def get(self, path: str) -> Any:
        if path == "/resolute/cache":
            about = {"bytes": 1 << 20, "modules": [], "whole_calls": [], "attention": []}
            return {"counters": copy.deepcopy(self.counted), **about}
        return {"events": [], "devices": [{"torch_vram_total": 1 << 30}]}

    def queue(self, nodes: dict[str, Any]) -> dict[str, Any]:
        return nodes

    def wait(self, nodes: dict[str, Any], timeout: float = 0.0) -> Any:
        return self.run(nodes, timeout)

    def run(self, nodes: dict[str, Any], timeout: float = 0.0) -> Any:
        kinds = [node["class_type"] for node in nodes.values()]
        self.prompts.append(nodes)
        if self.fails and self.fails in json.dumps(nodes):
            raise PromptError(f"{self.fails} failed\nmore")
        steps = nodes["sample"]["inputs"]["steps"] if "sample" in nodes else 0
        forwards = steps + kinds.count("VAEDecode")
        is_ours = self.asked[-1] == "resolute"
        self.counted["replays"] += forwards * is_ours
        self.counted["region_calls"] += forwards * is_ours
        captured = json.dumps([nodes["load"]["inputs"], nodes["latent"]["inputs"], len(self.started)])
        self.counted["captures"] += is_ours and steps > 0 and captured not in self._captured
        self._captured |= {captured} if is_ours and steps else set()
        size = json.dumps([nodes["latent"]["inputs"], kinds, len(self.started)])
        seconds = self._each + forwards * (0.05 if is_ours else 0.2) + self._new_size * (size not in self._seen)
        self._seen.add(size)
        self.clock += seconds
        stamps = {"execution_start": 0, "execution_success": 1000 * seconds}
        return {"status": {"messages": [(name, {"timestamp": at}) for name, at in stamps.items()]}, "nodes": nodes}

    def outputs(self, history: Any, key: str) -> list[Any]:
        return [1] if "latents" in history["nodes"] else []

    def images(self, history: Any, key: str) -> list[bytes]:
        file = io.BytesIO()
        seed, is_ours = history["nodes"]["sample"]["inputs"]["seed"], "ResoluteCompile" in str(history["nodes"])
        numpy.save(file, numpy.full(3, 1.0 + seed + self.error * is_ours))
        return [file.getvalue()]
