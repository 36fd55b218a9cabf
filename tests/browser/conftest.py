"""Fixtures: a ComfyUI server with the registry's archive and small models, and Chromium with its front end."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from scripts.places import ROOT
from scripts.server.process import ComfyServer, link
from scripts.setup import comfyui
from scripts.workflows import CONTROL_NET, LCM_LORA, SD15, SDXL

from ..archive import unpack
from ..conftest import PACK_NAME, linked_packs
from . import chromium, front_end
from .front_end import FrontEnd

MINI = "sd15-mini-full-vae"  # with an encoder, for image to image
# The store is on, in the server's own folder: without it no sizes are remembered, and the panel shows none.
ENVIRONMENT = {"RESOLUTE_STORE": "1"}


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", "browser: needs chromium and playwright")


@pytest.fixture(scope="session")
def server(
    make_server: Callable[..., ComfyServer],
    make_model: Callable[[str], str],
    comfyui_folder: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> ComfyServer:
    """The target ComfyUI with the archive that users install, whose models have the names of the bundled workflows and
    are small.
    """
    mini, control = make_model(MINI), make_model("sd15-mini-controlnet")
    installed = unpack(tmp_path_factory.mktemp("archive") / PACK_NAME)
    demo = {"resolute-demo-model": ROOT / "scripts" / "models" / "demo_model"}
    server = make_server(environment=ENVIRONMENT, packs={**linked_packs(), **demo, PACK_NAME: installed})
    settings = server.folder / "user" / "default" / "comfy.settings.json"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(json.dumps(front_end.USUAL), "utf-8")
    example = comfyui_folder(comfyui.TARGET) / "input" / "example.png"
    shutil.copyfile(example, server.input_folder / example.name)
    from scripts.models.generated import folder

    for name in (SD15, SDXL):
        link(folder() / "checkpoints" / mini, server.folder / "models" / "checkpoints" / name)
    for kind in ("controlnet", "loras"):
        (server.folder / "models" / kind).mkdir(exist_ok=True)
    link(folder() / "controlnet" / control, server.folder / "models" / "controlnet" / CONTROL_NET)
    save_file({}, server.folder / "models" / "loras" / LCM_LORA)  # a LoRA that changes nothing
    return server


@pytest.fixture(scope="session")
def browser(server: ComfyServer) -> Iterator[FrontEnd]:
    """One tab for all tests, with the page loaded."""
    missing = chromium.missing_requirement()
    if missing:
        pytest.skip(missing)
    with front_end.front_end(server.url) as opened:
        opened.load_page()
        yield opened


@pytest.fixture(scope="session")
def screenshots() -> Path:
    """Where the tests put their pictures, for a person to look at: RESOLUTE_SCREENSHOTS, or screenshots."""
    folder = Path(os.environ.get("RESOLUTE_SCREENSHOTS", ROOT / "screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def page(browser: FrontEnd) -> FrontEnd:
    """The tab with an empty graph and the usual settings."""
    browser.start()
    return browser
