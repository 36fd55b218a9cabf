"""The test harness itself: servers, the test pack and the generated models work as the tests expect."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.errors import PromptError, ServerError
from scripts.server.client import Client
from scripts.server.events import run_with_events
from scripts.server.process import ComfyServer
from scripts.setup import comfyui


def test_events_show_the_progress_of_the_sampler(client: Client, tiny_prompt: Any) -> None:
    events = run_with_events(client, tiny_prompt(steps=3, seed=77))
    steps = [data["value"] for data in events.of_type("progress") if data["node"] == "sample"]
    # ComfyUI skips progress messages of fast steps, but never that of the last one.
    assert steps == sorted(set(steps))
    assert steps[-1] == 3
    assert events.history["status"]["completed"]


def test_a_rejected_prompt_names_the_input(client: Client, tiny_prompt: Any) -> None:
    prompt = tiny_prompt(kind="sd")
    prompt["model"]["inputs"]["kind"] = "nonsense"
    with pytest.raises(PromptError, match=r"node model .*nonsense"):
        client.run(prompt)


def test_a_server_that_dies_shows_its_log(comfyui_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = comfyui_folder(comfyui.TARGET)
    server = ComfyServer(Path(sys.executable), folder, tmp_path, arguments=["--no-such-flag"])
    with pytest.raises(ServerError, match=r"(?s)ended with code 2 .*--no-such-flag"):
        server.start()
    assert server.process is None
