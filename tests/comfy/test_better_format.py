"""The line that says which format of a file would be faster: on which cards, for which models, once, and off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

GPU = torch.device("cuda", 0)
CARDS = {"RTX 30": (8, 6), "RTX 40": (8, 9), "RTX 50": (12, 0), "RTX 20": (7, 5), "A100": (8, 0), "H100": (9, 0)}
LARGE = 1 << 15  # numbers to a side of a matrix with over 10^9


def matrix(dtype: torch.dtype = torch.bfloat16, side: int = LARGE) -> torch.nn.Module:
    return torch.nn.Linear(side, side, bias=False, dtype=dtype, device="meta")


def convolution() -> torch.nn.Module:
    return torch.nn.Conv2d(LARGE // 2, LARGE // 4, 3, dtype=torch.half, device="meta")


@pytest.fixture
def better(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The adapter's module, on an RTX 30 with all of core's products."""
    module = core.ours("comfyui.better_format")
    monkeypatch.setattr(module, "_said", {})
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: CARDS["RTX 30"])
    for name in ("supports_int8_compute", "supports_fp8_compute", "supports_nvfp4_compute"):
        monkeypatch.setattr(f"comfy.model_management.{name}", lambda device: True, raising=False)
    return module


@pytest.mark.parametrize(
    ("card", "wanted"),
    [("RTX 30", "int8"), ("RTX 40", "fp8"), ("RTX 50", "NVFP4"), ("RTX 20", ""), ("A100", ""), ("H100", "")],
)
def test_a_card_is_told_the_format_that_it_multiplies(
    better: Any, monkeypatch: pytest.MonkeyPatch, card: str, wanted: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: CARDS[card])
    found = better.advice("flux", matrix(), GPU, "prompt")
    assert (wanted in found and "docs/formats.md" in found) if wanted else found is None


def test_it_is_said_in_one_prompt_for_each_model(better: Any) -> None:
    assert better.advice("flux", matrix(), GPU, "one") and better.advice("wan", matrix(), GPU, "two")
    assert better.advice("flux", matrix(), GPU, "one"), "by each sampler of that prompt"
    assert better.advice("flux", matrix(), GPU, "two") is None


@pytest.mark.parametrize(("card", "wanted"), [("RTX 30", None), ("RTX 40", "fp8"), ("RTX 50", None)])
def test_without_a_torch_for_cuda_13_only_fp8_is_fast(
    better: Any, monkeypatch: pytest.MonkeyPatch, card: str, wanted: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: CARDS[card])
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    found = better.advice("flux", matrix(), GPU, "prompt")
    assert found is None if wanted is None else wanted in found


@pytest.mark.parametrize(
    "model",
    [
        matrix(side=1000),
        matrix(torch.float8_e4m3fn),
        matrix(torch.float32),
        torch.nn.Sequential(matrix(), convolution()),
    ],
    ids=["small", "fp8", "float32", "with convolutions"],
)
def test_a_model_without_such_files_is_told_nothing(better: Any, model: torch.nn.Module) -> None:
    assert better.advice("model", model, GPU, "prompt") is None


def test_a_core_without_the_product_and_a_cpu_are_told_nothing(
    core: SimpleNamespace, better: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert better.advice("one", matrix(), torch.device("cpu"), "prompt") is None
    monkeypatch.setattr("comfy.model_management.supports_int8_compute", lambda device: False)
    assert better.advice("two", matrix(), GPU, "prompt") is None
    monkeypatch.delattr("comfy.model_management.supports_int8_compute")
    assert better.advice("three", matrix(), GPU, "prompt"), "a core that does not ask computes it on every card"
    monkeypatch.setattr(core.ours("comfyui.quantization"), "_algorithms", dict)
    assert better.advice("four", matrix(), GPU, "prompt") is None


def test_a_fault_in_it_costs_no_picture_and_it_can_be_switched_off(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = core.ours("forward.module_runner")
    config = SimpleNamespace(advises=True)
    monkeypatch.setattr(module.runtime, "cache", lambda: SimpleNamespace(config=config))
    monkeypatch.setattr(module.runtime, "fingerprint_of", lambda model: "model")
    monkeypatch.setattr(module.runs, "prompt_now", lambda: "prompt")
    monkeypatch.setattr(module.runs, "are_of_a_warm_up", lambda: False)
    runner = SimpleNamespace(_role=module.Role.UNET)

    def fails(*given: Any) -> None:
        raise TypeError("a weight has no size")

    monkeypatch.setattr(module.better_format, "advice", fails)
    assert module.ModuleRunner._advice(runner, matrix()) is None
    monkeypatch.setattr(module.better_format, "advice", lambda *given: "a line")
    assert module.ModuleRunner._advice(runner, matrix()) == "a line"
    config.advises = False
    assert module.ModuleRunner._advice(runner, matrix()) is None
