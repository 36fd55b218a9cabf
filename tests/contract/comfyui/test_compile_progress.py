"""What a compile node says while a region compiles in ComfyUI's own process."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def module(adapter: Callable[[str], ModuleType], comfy: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = adapter("comfyui.compile_progress")
    nothing = SimpleNamespace(dynprompt=SimpleNamespace(all_node_ids=set))
    monkeypatch.setattr(module.background_progress, "get_progress_state", lambda: nothing)
    monkeypatch.setattr(module, "_clock", (None, 0.0))
    return module


@pytest.fixture
def shown(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts on the node, the latest last."""
    texts: list[str] = []
    monkeypatch.setattr(module, "show_on_node", lambda text, node_id, workflow=None: texts.append(text))
    return texts


@pytest.fixture
def backend(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The only one. compile_eta: what it answers, 10 seconds for each region more."""
    made = SimpleNamespace(failed_regions=list)

    def compile_eta(more: int = 0) -> tuple[int, float | None]:
        left, seconds = made.left
        return left, None if seconds is None else seconds + 10.0 * more

    made.left, made.compile_eta = (0, 0.0), compile_eta
    monkeypatch.setattr(module.background_progress.registry, "NAMES", ("inductor",))
    monkeypatch.setattr(module.background_progress.registry, "get", lambda name: made)
    return made


@pytest.mark.parametrize(
    ("is_cancelled", "left", "text"),
    [
        (False, (2, None), "compiling 2 of 3, 7 s, first time only"),
        (False, (2, 34.0), "compiling 2 of 3, 7 s, about 35 s left"),
        (False, (1, 34.0), "compiling 2 of 3, 7 s, about 45 s left"),  # one is of a node that no call came to yet
        (True, (2, 34.0), "stops when this region is compiled"),
    ],
)
def test_the_text_of_a_compile_says_how_long(
    module: ModuleType,
    backend: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    is_cancelled: bool,
    left: tuple[int, float | None],
    text: str,
) -> None:
    monkeypatch.setattr(module.comfy.model_management, "processing_interrupted", lambda: is_cancelled)
    backend.left = left
    assert module.CompileProgress(None, "sampling", lambda: 7.0)._text(1, 3, 7.0) == text


def test_one_clock_counts_what_a_prompt_waits_in_its_model_and_its_decoder(
    module: ModuleType, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited, state = [100.0], SimpleNamespace(prompt_id="first")
    monkeypatch.setattr(module, "get_progress_state", lambda: state)
    seconds = []
    for prompt, doing in (("first", "sampling"), ("first", "decoding"), ("second", "sampling")):
        state.prompt_id = prompt
        progress = module.CompileProgress(None, doing, lambda: waited[0])
        progress.begin_run()
        progress.report(0, 2)
        seconds.append(shown[-1].split(", ")[1])
        waited[0] += 20.0
        progress.finish()
    assert seconds == ["0 s", "20 s", "0 s"]


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_the_text_says_what_comes_after_compiling(
    module: ModuleType, shown: list[str], monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    counted = list[object]()
    monkeypatch.setattr(module.background_progress, "ensure_ticker", lambda: counted.append(True))
    progress = module.CompileProgress(None, "sampling", lambda: 3.0)
    progress.set_total(0, 3)
    progress.begin_run()
    try:
        progress.report(0, 3)
        progress.report(2, 3)  # when the second region ended
        assert shown[-1].startswith("compiling 3 of 3, 0 s, ")
        if is_cancelled:
            raise progress.cancellations[0]
    except progress.cancellations:
        progress.finish()
    progress.finish()
    assert shown[-1] == ("stopped" if is_cancelled else "sampling")
    assert len(counted) == is_cancelled, "what is left goes on to be compiled"


def test_a_part_that_waits_says_when_code_comes_until_its_run_ends_and_the_badge_until_all_came(
    module: ModuleType, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    background = module.background_progress
    left, texts, counts = [(6, 38.0)], queue.SimpleQueue[str](), queue.SimpleQueue[dict[str, Any]]()
    monkeypatch.setattr(background, "_TICK", 0.01)
    monkeypatch.setattr(background, "prompt_runs", lambda: True)
    monkeypatch.setattr(background, "show_on_node", lambda text, node_id: texts.put(text))
    monkeypatch.setattr(background, "broadcast", lambda kind, **data: counts.put(data))
    monkeypatch.setattr(background.registry, "NAMES", ("inductor",))
    failed = ["of another prompt"]
    backend = SimpleNamespace(compile_eta=lambda more=0: left[0], failed_regions=lambda: failed)
    monkeypatch.setattr(background.registry, "get", lambda name: backend)
    progress = module.CompileProgress("8", "sampling", lambda: 0.0)
    progress.begin_run()
    progress.note_waiting_call()
    ticker = background._ticker
    assert texts.get(timeout=60) == "sampling at ComfyUI's speed; compiled blocks in about 40 s"
    assert counts.get(timeout=60)["text"] == "0 of 6 regions compiled, ready in about 40 s"
    progress.show_result("144x112: compiling meanwhile")
    left[0] = 2, 12.0
    assert counts.get(timeout=60)["text"] == "4 of 6 regions compiled, ready in about 10 s"
    left[0] = 3, 1240.0  # of a decoder, on a busy machine
    assert counts.get(timeout=60)["text"] == "4 of 7 regions compiled, ready in about 21 min"
    failed.append("no compiler")
    left[0] = 2, 12.0
    one_has_no_code = "4 of 7 regions compiled, 1 failed, ready in about 10 s"
    list(iter(lambda: counts.get(timeout=60)["text"], one_has_no_code))
    again = module.CompileProgress("8", "sampling", lambda: 0.0)  # the node is executed anew
    assert (again.is_waiting, module.CompileProgress("8", "decoding", lambda: 0.0).is_waiting) == (True, False)
    left[0] = 0, 0.0
    ticker.join(60)
    assert counts.get(timeout=60) == {"left": 0}
    assert texts.empty() and counts.empty()
    assert shown[-1] == "2 regions could not be compiled: of another prompt", "no longer that it compiles meanwhile"
    again.begin_run()
    again.note_all_compiled()
    assert (again.became_ready, again.is_waiting, shown[-1]) == (True, False, "Now compiled")
    assert not module.CompileProgress("8", "sampling", lambda: 0.0).is_waiting


@pytest.mark.parametrize(
    ("looks", "ends", "badge"),  # regions in the queue, and how many looks come after the prompt's end
    [
        # The model's, then the decoder's too: the text is the same, the number that is left is not.
        ([6, 6, 15, 14, 3, 0], 1, [*["0 of 15 in about 90 s"] * 2, "1 of 15 in about 80 s", "12 of 15 in about 20 s"]),
        ([6, 6, 5, 0], 2, ["0 of 15 in about 90 s", "1 of 6 in about 30 s"]),  # cancelled before it decodes
    ],
)
def test_the_first_estimate_behind_the_picture_is_one_of_all_that_the_prompt_compiles(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, looks: list[int], ends: int, badge: list[str]
) -> None:
    background, texts, counts = module.background_progress, list[str](), list[str]()
    looks = list(looks)
    nodes = SimpleNamespace(all_node_ids=lambda: {"8", "9"})
    monkeypatch.setattr(module.background_progress, "get_progress_state", lambda: SimpleNamespace(dynprompt=nodes))
    monkeypatch.setattr(background, "counts", {})
    monkeypatch.setattr(background, "unfinished", {})
    monkeypatch.setattr(background, "_waiting", {})
    monkeypatch.setattr(background, "_TICK", 0.01)
    monkeypatch.setattr(background, "prompt_runs", lambda: len(looks) > ends)
    monkeypatch.setattr(background, "show_on_node", lambda text, node_id: texts.append(text))
    monkeypatch.setattr(background, "broadcast", lambda kind, left, text="", **data: counts.append(text))
    monkeypatch.setattr(background.registry, "NAMES", ("inductor",))

    questions = itertools.cycle(("first", "second"))  # of a look

    def asked(more: int) -> tuple[int, float]:
        left = looks.pop(0) if next(questions) == "second" and len(looks) > 1 else looks[0]
        return left, 6.0 * (left + more)

    monkeypatch.setattr(
        background.registry, "get", lambda name: SimpleNamespace(compile_eta=asked, failed_regions=list)
    )
    parts = {"sampling": ("8", 6), "decoding": ("9", 9), "encoding": ("9", 7), "running": ("of another workflow", 5)}
    for doing, (node_id, regions) in parts.items():
        module.CompileProgress(node_id, doing, lambda: 0.0).set_total(0, regions)
    module.CompileProgress("8", "sampling", lambda: 0.0).note_waiting_call()
    background._ticker.join(60)
    assert texts[0] == "sampling at ComfyUI's speed; compiled blocks in about 90 s"
    assert [text.replace("regions compiled, ready ", "") for text in counts] == [*badge, ""]


@pytest.mark.parametrize(
    ("gain", "expected"),
    [
        (2.4, "ComfyUI's own blocks as one CUDA graph (2.4 times as fast); compiled blocks in about 30 s"),
        (1.01, "ComfyUI's own blocks as one CUDA graph; compiled blocks in about 30 s"),
        (None, "ComfyUI's own blocks as one CUDA graph; compiled blocks in about 30 s"),
    ],
)
def test_captures_of_originals_say_what_they_gain(module: ModuleType, gain: float | None, expected: str) -> None:
    assert module.background_progress._text("sampling", 30.0, lambda: gain) == expected
    until = "estimating when compiled blocks are there"
    assert module.background_progress._text("sampling", None, lambda: gain) == f"{expected.partition('; ')[0]}; {until}"


def test_an_encoder_counts_once_it_ran(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = SimpleNamespace(all_node_ids=lambda: {"9"})
    monkeypatch.setattr(module.background_progress, "get_progress_state", lambda: SimpleNamespace(dynprompt=nodes))
    monkeypatch.setattr(module.background_progress, "counts", {("9", "encoding"): (0, 7), ("9", "decoding"): (2, 9)})
    monkeypatch.setattr(module.background_progress, "unfinished", {})
    assert module.background_progress._uncompiled_count() == 7
    module.background_progress.unfinished["9", "encoding"] = print
    assert module.background_progress._uncompiled_count() == 14


def test_a_load_is_said_after_a_second_and_only_while_the_prompt_waits(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(module, "show_on_node", lambda text, node_id, workflow=None: texts.put(text))
    monkeypatch.setattr(module, "_TICK", 0.01)
    begun, clock = iter((7.0, 7.5)), [7.5]
    progress = module.CompileProgress(None, "sampling", lambda: next(begun, clock[0]))
    progress.loading()
    try:
        clock[0] = 8.2
        assert texts.get(timeout=60) == "loading, 8 s"
        assert texts.get(timeout=60) == "sampling", "the clock stands still: its regions run"
    finally:
        progress.finish()
    assert texts.empty()
    quick = module.CompileProgress(None, "sampling", lambda: 7.0)
    quick.loading()
    quick._tick()
    quick.finish()
    assert texts.empty()
