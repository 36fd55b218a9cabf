"""The probe of the backend `oneflow` reads only package metadata and gives a reason and a remedy."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from compile_cache.backends.oneflow import packages
from compile_cache.backends.registry import CHOICES, resolve
from compile_cache.errors import BackendUnavailableError

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The installed versions; none by default."""
    found: dict[str, str] = {}
    monkeypatch.setattr(packages, "version_of", lambda name: found.get(name, ""))
    monkeypatch.setattr(sys, "platform", "linux")
    return found


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A fake NVIDIA GPU whose compute capability a test can set."""
    chosen = SimpleNamespace(architecture=(8, 6), name="NVIDIA GeForce RTX 3090")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: chosen.architecture)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: chosen.name)
    return chosen


def test_it_can_be_chosen_and_auto_never_chooses_it() -> None:
    assert "oneflow" in CHOICES
    assert resolve("auto", "mps")[0].name != "oneflow"


@pytest.mark.usefixtures("versions")
class TestWithoutThePackages:
    def test_the_message_names_both_pythons_and_the_install_command(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "version_info", (3, 11, 7))
        with pytest.raises(BackendUnavailableError, match=r"3\.10 and older, and this is Python 3\.11") as caught:
            resolve("oneflow", "cpu")
        assert f"in a Python 3.10 with `python -m pip install -r {packages.REQUIREMENTS}`" in str(caught.value)

    def test_the_requirements_file_exists_and_pins_both(self) -> None:
        text = (ROOT / packages.REQUIREMENTS).read_text("utf-8")
        assert "oneflow==0.9.0" in text
        assert "onediff==1.2.0" in text


class TestWithThePackages:
    @pytest.fixture(autouse=True)
    def _installed(self, versions: dict[str, str]) -> None:
        versions |= {"oneflow": "0.9.0", "onediff": "1.2.0"}

    def test_the_compiler_and_the_versions_are_named(self) -> None:
        _, capabilities, why = resolve("oneflow", "cpu")
        assert why == (
            "oneflow, as chosen (compiler lowering, oneflow 0.9.0, onediff 1.2.0; one graph per size, rebuilt after a "
            "restart)"
        )
        assert capabilities.captures
        assert capabilities.keeps_graphs

    def test_a_newer_oneflow_uses_the_compiler_onediff(self, versions: dict[str, str]) -> None:
        versions["oneflow"] = "1.0.0"
        assert "compiler onediff" in resolve("oneflow", "cpu")[2]

    @pytest.mark.parametrize("architecture", [(6, 1), (7, 5), (8, 0), (8, 6), (8, 9)])
    def test_a_supported_gpu_is_accepted(self, gpu: SimpleNamespace, architecture: tuple[int, int]) -> None:
        gpu.architecture = architecture
        assert resolve("oneflow", "cuda")[1].available

    @pytest.mark.parametrize("architecture", [(5, 2), (9, 0), (10, 0), (12, 0)])
    def test_an_unsupported_gpu_is_refused_by_name(self, gpu: SimpleNamespace, architecture: tuple[int, int]) -> None:
        gpu.architecture, gpu.name = architecture, "NVIDIA H200"
        with pytest.raises(BackendUnavailableError, match=r"NVIDIA H200 is of architecture \d+\.\d.*6\.0 to 8\.9"):
            resolve("oneflow", "cuda")

    def test_cuda_without_a_driver_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(BackendUnavailableError, match="no NVIDIA driver"):
            resolve("oneflow", "cuda")

    def test_other_devices_and_other_systems_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(BackendUnavailableError, match="'mps'"):
            resolve("oneflow", "mps")
        monkeypatch.setattr(sys, "platform", "win32")
        with pytest.raises(BackendUnavailableError, match="Linux"):
            resolve("oneflow", "cpu")
