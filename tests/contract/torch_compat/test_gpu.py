"""A torch for AMD calls its GPUs "cuda": nothing that NVIDIA alone has is asked of them."""

from __future__ import annotations

import pytest
import torch

from compile_cache.backends.cuda_graphs.memory import is_trimmable
from compile_cache.backends.cudagraph import CudaGraphBackend
from compile_cache.backends.inductor import backend as inductor
from compile_cache.backends.inductor.lower.casts import _lacks_fp8
from compile_cache.backends.oneflow import packages
from compile_cache.torch_compat.gpu import is_nvidia

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch for AMD with a GPU, as far as a probe asks it. What is asked of CUDA fails."""

    def fails(*given: object) -> object:
        raise AssertionError("CUDA alone has that")

    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("get_device_capability", "get_allocator_backend"):
        monkeypatch.setattr(torch.cuda, name, fails)


def test_only_a_torch_for_nvidia_has_nvidias_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [is_nvidia(device) for device in ("cuda", "cuda:1", DEVICE, "cpu")] == [True, True, True, False]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not any(is_nvidia(device) for device in ("cuda", "cuda:1", DEVICE, "cpu"))


def test_inductor_compiles_there_without_captures(amd: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "lack_of", lambda device: None)
    found = inductor._probe_machine("cuda")
    assert (found.available, found.compiles, found.captures) == (True, True, False)
    assert not _lacks_fp8(DEVICE)
    assert not is_trimmable()


def test_backends_of_nvidia_say_so(amd: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = CudaGraphBackend().probe("cuda")
    assert not found.available
    assert "need an NVIDIA GPU" in found.reason
    monkeypatch.setattr(packages, "installed", lambda: packages.Installed("0.9.0", "1.2.0"))
    monkeypatch.setattr("sys.platform", "linux")
    assert "runs on NVIDIA GPUs and on the CPU" in (packages.unavailable_reason("cuda") or ("",))[0]
