"""What a compile node says while a region compiles in ComfyUI's own process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.mark.parametrize(
    ("is_cancelled", "text"), [(False, "compiling 2 of 3, 7 s"), (True, "stopping; 1 of 3 are kept")]
)
def test_a_cancel_is_shown_before_it_can_be_answered(
    adapter: Callable[[str], ModuleType], comfy: None, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool, text: str
) -> None:
    module = adapter("comfyui.compile_progress")
    monkeypatch.setattr(module.comfy.model_management, "processing_interrupted", lambda: is_cancelled)
    monkeypatch.setattr(module, "_compiler_started", True)
    assert module.CompileProgress._compiling(1, 3, 7.0) == text


def test_the_first_part_has_a_name_of_its_own(adapter: Callable[[str], ModuleType], comfy: None) -> None:
    module = adapter("comfyui.compile_progress")
    assert module.CompileProgress._compiling(0, 14, 7.0) == "starting the compiler, then 14 regions, 7 s"


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_the_text_says_what_comes_after_compiling(
    adapter: Callable[[str], ModuleType], comfy: None, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    module = adapter("comfyui.compile_progress")
    monkeypatch.setattr(module, "_together", lambda done, total: (done, total))
    progress = module.CompileProgress(None, "sampling", lambda: 3.0)
    shown: list[str] = []
    monkeypatch.setattr(progress, "show", shown.append)
    progress.set_total(0, 3)
    progress.begin_run()
    try:
        progress.report(0, 3, "")
        progress.report(2, 3, "")  # when the second region ended
        assert shown[-1] == "compiling 3 of 3, 0 s"
        if is_cancelled:
            raise progress.cancellations[0]
    except progress.cancellations:
        progress.finish()
    progress.finish()
    assert shown[-1] == ("stopped; 2 of 3 are kept" if is_cancelled else "sampling")


def test_an_estimate_is_shown_once_each_kind_that_is_left_was_measured(
    adapter: Callable[[str], ModuleType], comfy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = adapter("comfyui.compile_progress")
    monkeypatch.setattr(module, "_together", lambda done, total: (done, total))
    monkeypatch.setattr(module, "_compiler_started", True)
    now = [0.0]
    progress = module.CompileProgress(None, "sampling", lambda: now[0])
    shown: list[str] = []
    monkeypatch.setattr(progress, "show", shown.append)
    progress.begin_run()
    try:
        progress.report(0, 3, "", ["ResBlock", "ResBlock", "Attention"])
        assert shown[-1] == "compiling 1 of 3, 0 s"
        now[0] = 20.0
        progress.report(1, 3, "", ["ResBlock", "Attention"])
        assert shown[-1] == "compiling 2 of 3, 20 s", "Attention was never measured"
        now[0] = 27.0
        progress.report(2, 3, "", ["ResBlock"])
        assert shown[-1] == "compiling 3 of 3, 27 s, about 20 s left"
        assert (progress._took.of("ResBlock"), progress._took.of("Attention")) == (20.0, 7.0)
    finally:
        progress.finish()


def test_a_text_has_its_numbers_from_the_start(
    adapter: Callable[[str], ModuleType], comfy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = adapter("comfyui.compile_progress").CompileProgress(None, "sampling", lambda: 7.0)
    shown = threading.Event()
    texts: list[str] = []

    def show(text: str) -> None:
        texts.append(text)
        shown.set()

    monkeypatch.setattr(progress, "show", show)
    progress.loading(14)
    try:
        assert shown.wait(60)  # of the thread, as where the prompt's own has to wait
    finally:
        progress.finish()
    assert texts == ["loading 14 compiled regions, 7 s"]
