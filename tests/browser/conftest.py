"""Fixtures: a ComfyUI server with the pack, and Chromium with its front end."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.support import comfyui, front_end
from scripts.support.front_end import FrontEnd
from scripts.support.server import ComfyServer
from scripts.support.workflow_models import CONTROL_NET, LCM_LORA, SD15, SDXL


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", "browser: needs chromium and playwright")


@pytest.fixture(scope="session")
def server(make_server: Callable[..., ComfyServer], comfyui_folder: Callable[[str], Path]) -> ComfyServer:
    """The target ComfyUI, with empty files named like the workflows' models; nothing is sampled here."""
    server = make_server()
    example = comfyui_folder(comfyui.TARGET) / "input" / "example.png"
    shutil.copyfile(example, server.input_folder / example.name)
    for name in (SD15, SDXL):
        (server.folder / "models" / "checkpoints" / name).touch()
    for kind, name in (("controlnet", CONTROL_NET), ("loras", LCM_LORA)):
        (server.folder / "models" / kind).mkdir(exist_ok=True)
        (server.folder / "models" / kind / name).touch()
    return server


@pytest.fixture(scope="session")
def browser(server: ComfyServer) -> Iterator[FrontEnd]:
    """One tab for all tests; each test reloads the page."""
    missing = front_end.missing_requirement()
    if missing:
        pytest.skip(missing)
    with front_end.front_end(server.url) as opened:
        yield opened
