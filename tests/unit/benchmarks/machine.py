"""A machine whose servers answer at once, for tests of benchmarks."""

from __future__ import annotations

import copy
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

from benchmarks import rig
from scripts.errors import PromptError
from scripts.setup.command import Setup

_COUNTERS = "region_compiles region_calls captures evictions graph_calls replays original_replays eager_calls"


class Machine:
    """Its clock is moved by prompts and sleep. A forward takes 0.2 s, with our nodes 0.05 s and a replay; each prompt
    takes `each` seconds more; ours captures a model's size once. It is the server, its client and its process in one.
    """

    def __init__(self, each: float = 0.0) -> None:
        self.started: list[tuple[str, dict[str, str]]] = []  # folders and variables
        self.prompts: list[dict[str, Any]] = []
        self.fails = ""  # a prompt with this in it fails
        self.clock, self.pid = 100.0, os.getpid()
        self.counted: dict[str, Any] = dict.fromkeys(_COUNTERS.split(), 0)
        self.counted |= {"waiting_calls": 0, "stall_seconds": 0.0, "bypasses": {}}
        self.client = self.process = self
        self.error = 0.0  # by which our latents differ
        self.each, self._captured = each, set[str]()

    def serve(self, monkeypatch: pytest.MonkeyPatch, benchmark: Any) -> Machine:
        """Answer in place of the servers of a benchmark."""
        monkeypatch.setattr(rig, "server", self.server)
        monkeypatch.setattr(rig, "time", self)
        monkeypatch.setattr(rig, "environment", lambda server: {"date": "2026-11-25T10", "gpu": "a GPU"})
        monkeypatch.setattr(benchmark.command, "prepare", lambda: Setup(Path(sys.executable), {"0.33.0": Path()}))
        return self

    def server(self, setup: Any, folder: Path, arguments: list[str], **settings: Any) -> Machine:
        self.started.append((folder.name, settings["environment"]))
        folder.mkdir(parents=True, exist_ok=True)
        return self

    @property
    def asked(self) -> list[str]:
        """Whose prompts came, in their order."""
        return ["resolute" if "ResoluteCompile" in str(nodes) else "stock" for nodes in self.prompts]

    def __enter__(self) -> Machine:
        return self

    def post(self, *_: Any) -> None: ...

    __exit__ = poll = post

    def monotonic(self) -> float:
        return self.clock

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.clock += seconds

    def log(self) -> str:
        return "Device: a GPU\nother"

    def get(self, path: str) -> Any:
        return {"counters": copy.deepcopy(self.counted)} if path == "/resolute/cache" else {"events": []}

    def queue(self, nodes: dict[str, Any]) -> dict[str, Any]:
        return nodes

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
        captured = {json.dumps([nodes["load"]["inputs"], nodes["latent"]["inputs"], len(self.started)])}
        captured = (captured if is_ours and steps else set()) - self._captured
        self.counted["captures"] += len(captured)
        self._captured |= captured
        seconds = self.each + forwards * (0.05 if is_ours else 0.2)
        self.clock += seconds
        stamps = {"execution_start": 0, "execution_success": 1000 * seconds}
        return {"status": {"messages": [(name, {"timestamp": at}) for name, at in stamps.items()]}, "nodes": nodes}

    wait = run

    def outputs(self, history: Any, key: str) -> list[Any]:
        return [1] if "latents" in history["nodes"] else []

    def images(self, history: Any, key: str) -> list[bytes]:
        file = io.BytesIO()
        seed, is_ours = history["nodes"]["sample"]["inputs"]["seed"], "ResoluteCompile" in str(history["nodes"])
        numpy.save(file, numpy.full(3, 1.0 + seed + self.error * is_ours))
        return [file.getvalue()]
