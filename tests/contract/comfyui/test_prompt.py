"""What a prompt carries, and what waits for its end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

# The switch Resolute on/off, as the prompt carries it.


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


# Work that is left for the end of the running prompt, with a queue that has what ComfyUI's has.


class Queue:
    """As ComfyUI's PromptQueue: `task_done` ends the running prompt."""

    def __init__(self) -> None:
        self.mutex = threading.RLock()
        self.currently_running: dict[int, Any] = {}
        self.done: list[int] = []

    def task_done(self, item: int, result: object = None) -> str:
        self.done.append(item)
        self.currently_running.pop(item)
        return "done"


@pytest.fixture
def ends(adapter: Callable[[str], ModuleType], comfy: None) -> ModuleType:
    return adapter("comfyui.prompt_end")


def test_without_a_prompt_nothing_is_left(ends: ModuleType) -> None:
    assert ends.when_prompt_ends(Queue(), lambda: None) is False


def test_it_is_done_once_before_the_next_prompt_and_leaves_no_trace(ends: ModuleType) -> None:
    queue, calls = Queue(), list[str]()

    def action() -> None:
        calls.append("freed")

    queue.currently_running[7] = "prompt"
    assert ends.when_prompt_ends(queue, action) is True
    assert ends.when_prompt_ends(queue, action) is True
    assert calls == []
    assert queue.task_done(7, result={}) == "done"
    assert (calls, queue.done) == (["freed"], [7])
    queue.currently_running[8] = "prompt"
    queue.task_done(8)
    assert calls == ["freed"]
    assert "task_done" not in vars(queue)


def test_a_failure_costs_the_prompt_nothing(ends: ModuleType) -> None:
    queue = Queue()
    queue.currently_running[7] = "prompt"
    ends.when_prompt_ends(queue, lambda: 1 / 0)
    assert queue.task_done(7) == "done"
    assert "task_done" not in vars(queue)


def test_what_another_pack_put_around_it_stays(ends: ModuleType) -> None:
    queue, seen, calls = Queue(), list[int](), list[str]()
    queue.currently_running[7] = "prompt"
    ends.when_prompt_ends(queue, lambda: calls.append("freed"))
    ours = queue.task_done

    def theirs(item: int) -> Any:
        seen.append(item)
        return ours(item)

    queue.task_done = theirs  # type: ignore[method-assign, assignment]
    queue.task_done(7)
    queue.currently_running[8] = "prompt"
    queue.task_done(8)
    assert (seen, calls) == ([7, 8], ["freed"])
