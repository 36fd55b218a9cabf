"""What a compile node says while a region compiles in ComfyUI's own process."""

from __future__ import annotations

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
    memory = module.comfy.model_management
    monkeypatch.setattr(memory, "processing_interrupted", lambda: is_cancelled, raising=False)
    assert module.CompileProgress._compiling(1, 3, 7.0) == text
