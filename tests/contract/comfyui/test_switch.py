"""The switch Resolute on/off, as the prompt carries it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest


@pytest.mark.parametrize(
    ("inputs", "is_off"),
    [
        ({"resolute": "off"}, True),
        ({"resolute": "off 17.3"}, True),
        ({"resolute": "on 17.1"}, False),
        ({"resolute": "offline"}, False),
        ({"resolute": ["1", 0]}, False),
        ({"model": ["1", 0]}, False),
        ({}, False),
    ],
)
def test_an_input_of_the_node_says_off(
    adapter: Callable[[str], ModuleType],
    comfy: None,
    monkeypatch: pytest.MonkeyPatch,
    inputs: dict[str, object],
    is_off: bool,
) -> None:
    switch = adapter("comfyui.switch")
    prompt = {"8": {"class_type": "ResoluteCompileModel", "inputs": inputs}}
    dynamic = SimpleNamespace(has_node=prompt.__contains__, get_node=prompt.__getitem__)
    monkeypatch.setattr(switch, "get_progress_state", lambda: SimpleNamespace(dynprompt=dynamic))
    shown: list[str] = []
    monkeypatch.setattr(switch, "show_on_node", lambda text, node_id: shown.append(text))
    assert switch.is_off("8") is is_off
    # During a measurement the node shows the result.
    assert bool(shown) is (inputs.get("resolute") == "off")
    assert switch.is_off(None) is switch.is_off("9") is False
