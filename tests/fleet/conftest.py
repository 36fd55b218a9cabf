"""A fleet of two real ComfyUI processes on real Ray Serve, shared by the session. `scripts/test --fleet` runs this."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import yaml
from PIL import Image

from scripts.errors import ServerError
from scripts.places import ROOT, inductor_cache
from scripts.ports import free_port
from scripts.server.client import Client
from scripts.server.process import CPU_ARGUMENTS, ComfyServer, link
from scripts.serving.ray_start import set_environment
from scripts.setup import comfyui

from ..comfy.rig import PromptDict, compile_model, tiny_prompt, with_model

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_CACHE_DIR": str(inductor_cache()),
}
LEVELS = 1  # of 255, as in the other server tests
PACKS = {"resolute": ROOT, "resolute-test-pack": ROOT / "tests" / "pack"}
_START_SECONDS = 600.0

set_environment()  # before a test imports Ray


class Fleet:
    """`scripts/fleet up` as a process, with its folder."""

    def __init__(self, folder: Path, comfyui_folder: Path, **settings: Any) -> None:
        self.folder = folder / "fleet"
        for name, source in PACKS.items():
            (folder / "base" / "custom_nodes").mkdir(parents=True, exist_ok=True)
            link(source, folder / "base" / "custom_nodes" / name)
        self.settings = {
            "comfyui": str(comfyui_folder),
            "python": os.environ["RESOLUTE_COMFYUI_PYTHON"],
            "folder": str(self.folder),
            "arguments": [*CPU_ARGUMENTS, "--base-directory", str(folder / "base")],
            "environment": ENVIRONMENT,
            "gpus": 0,
            "cpus": 0.5,
            "body_mb": 4,
            "ongoing": 2,  # so that a few prompts fill the fleet
            "waiting": 4,  # for a moment each of four clients' prompts waits while the router chooses
            **settings,
        }
        self._config = folder / "fleet.yaml"
        self._config.write_text(yaml.safe_dump(self.settings), "utf-8")
        self._log = folder / "fleet.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until every replica is ready."""
        command = [sys.executable, str(ROOT / "scripts" / "fleet"), "up", "--config", str(self._config)]
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        self.wait(lambda: self.ready() == self.settings["replicas"], "the fleet is ready")

    def ready(self) -> int:
        """How many replicas are ready; 0 while nothing answers."""
        try:
            return int(self.client.get("/ready")["ready"])
        except (OSError, ServerError):  # 503, or refused
            return 0

    def wait(self, reached: Callable[[], bool], what: str, seconds: float = _START_SECONDS) -> None:
        """Wait until `reached()`; the test fails with the end of the log if it does not come."""
        deadline = time.monotonic() + seconds
        while not reached():
            assert self._process is not None
            assert self._process.poll() is None, f"The fleet ended: {self.log()}"
            assert time.monotonic() < deadline, f"not after {seconds:.0f} s: {what}. {self.log()}"
            time.sleep(0.2)

    def stop(self) -> None:
        """End it with SIGTERM, as `scripts/fleet down` does, and by force if it does not end."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(120)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                raise

    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")[-3000:]

    @property
    def client(self) -> Client:
        return Client(f"http://127.0.0.1:{self.settings['port']}")

    def state(self) -> dict[str, Any]:
        """`GET /resolute/fleet`."""
        found: dict[str, Any] = self.client.get("/resolute/fleet")
        return found

    def replica(self, name: str) -> dict[str, Any]:
        """The report of one replica; empty if it is gone."""
        return next((each for each in self.state()["replicas"] if each["replica"] == name), {})

    def post(self, path: str, content: bytes, **headers: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Status, JSON and headers of the answer, also of an HTTP error."""
        request = urllib.request.Request(self.client.url + path, data=content, headers=headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read() or b"{}"), dict(answer.headers)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read()), dict(error.headers)

    def finished_once(self, prompt_id: str) -> dict[str, Any]:
        """The entry of a prompt, which left no second report and is in no queue."""
        history = self.client.wait(prompt_id, 300)
        assert Counter(each["prompt_id"] for each in self.state()["prompts"])[prompt_id] <= 1
        assert prompt_id not in str(self.client.get("/queue"))
        return history

    def running(self, prompt_id: str) -> str:
        """Wait until a prompt runs, and return its replica."""
        self.wait(
            lambda: any(each[1] == prompt_id for each in self.client.get("/queue")["queue_running"]), "it runs", 120
        )
        return str(next(each["replica"] for each in self.state()["decisions"] if each["prompt_id"] == prompt_id))


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two replicas."""
    made = Fleet(tmp_path_factory.mktemp("fleet"), comfyui.ensure(ROOT), replicas=2, port=free_port())
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="session")
def single(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """One plain ComfyUI with the fleet's compiled regions, whose pictures are what the fleet's must be."""
    with ComfyServer(
        Path(os.environ["RESOLUTE_COMFYUI_PYTHON"]),
        comfyui.ensure(ROOT),
        tmp_path_factory.mktemp("single"),
        packs=PACKS,
        environment={**ENVIRONMENT, "RESOLUTE_STORE": str(fleet.folder / "regions")},
    ) as server:
        yield server


def tiny(
    seed: int, kind: str = "sd", width: int = 128, height: int = 128, steps: int = 1, model: int = 0
) -> PromptDict:
    """A compiled prompt of the test pack's tiny model. model: the seed of its weights."""
    return with_model(plain(seed, steps, kind=kind, width=width, height=height, model=model), compile_model())


def plain(seed: int, steps: int, model: int = 0, **settings: Any) -> PromptDict:
    """The same without Resolute: it compiles nothing, so its time is its steps."""
    prompt = tiny_prompt(seed=seed, steps=steps, **{"width": 128, "height": 128, **settings})
    prompt["model"]["inputs"]["seed"] = model
    del prompt["samples"]
    return prompt


def dumped(prompt: PromptDict, **more: Any) -> bytes:
    """The body of `POST /prompt`."""
    return json.dumps({"prompt": prompt, **more}).encode()


def pixels(client: Client, history: dict[str, Any]) -> Any:
    """The only picture of a prompt: height, width, channels; 0 to 255."""
    (content,) = client.images(history)
    return numpy.asarray(Image.open(io.BytesIO(content)).convert("RGB")).astype(int)
