"""A server for tests and benchmarks starts without ComfyUI's front end, and says what else is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts.errors import ServerError
from scripts.server import front_end
from scripts.server.process import ComfyServer

PYTHON = Path(sys.executable)


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_end, "_PACKAGE", "no_package_has_this_name")
    front_end._has_package.cache_clear()


@pytest.mark.usefixtures("not_installed")
def test_without_the_package_a_server_gets_a_page(tmp_path: Path) -> None:
    command = ComfyServer(PYTHON, tmp_path, tmp_path).command()
    root = Path(command[command.index("--front-end-root") + 1])
    assert "Install ComfyUI's requirements" in (root / "index.html").read_text("utf-8")


@pytest.mark.usefixtures("not_installed")
@pytest.mark.parametrize("given", [["--front-end-root", "there"], ["--front-end-version=x/y@1.0.0"]])
def test_a_front_end_that_is_named_stays(tmp_path: Path, given: list[str]) -> None:
    assert ComfyServer(PYTHON, tmp_path, tmp_path, arguments=given).command()[-len(given) :] == given


def test_with_the_package_nothing_is_added(tmp_path: Path) -> None:
    (tmp_path / "comfyui_frontend_package").mkdir()
    assert front_end.arguments(PYTHON, tmp_path / "page", (), str(tmp_path)) == []
    assert not (tmp_path / "page").exists()


@pytest.mark.parametrize(
    ("log", "package"),
    [("ModuleNotFoundError: No module named 'aiohttp'", "aiohttp"), ("comfy-thing is not installed.", "comfy-thing")],
)
def test_a_server_that_ends_names_the_package_that_it_lacks(tmp_path: Path, log: str, package: str) -> None:
    (tmp_path / "main.py").write_text(f"print({log!r})\nraise SystemExit(1)\n", "utf-8")
    with pytest.raises(ServerError, match=rf"lacks {package}: run `.* -m pip install -r .*requirements\.txt`"):
        ComfyServer(PYTHON, tmp_path, tmp_path / "server").start()
