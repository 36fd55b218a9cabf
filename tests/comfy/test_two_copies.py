"""Two copies of the pack in custom_nodes: the first works, the second does nothing, and both places say so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from scripts.places import ROOT
from scripts.server.process import ComfyServer
from tests.conftest import PACK_NAME, linked_packs

from .rig import Bench, assert_same, assert_through_regions, compile_model, run_with_events, with_model

OTHER = "ComfyUI-Resolute"
STEPS = 2


@pytest.fixture(scope="module")
def both(make_server: Callable[..., ComfyServer]) -> Iterator[ComfyServer]:
    server = make_server(packs={**linked_packs(), OTHER: ROOT})
    yield server
    server.stop()


@pytest.fixture(scope="module")
def copies(both: ComfyServer) -> tuple[str, str]:
    """The folders' names, the one that works first: ComfyUI loads packs in the order of the file system."""
    nodes = both.client.get("/object_info").values()
    (first,) = {node["python_module"] for node in nodes if node["name"].startswith("ResoluteCompile")}
    name = first.removeprefix("custom_nodes.")
    assert name in (PACK_NAME, OTHER)
    return (PACK_NAME, OTHER) if name == PACK_NAME else (OTHER, PACK_NAME)


def test_a_compiled_prompt_is_right_and_its_node_says_that_there_are_two(
    both: ComfyServer, copies: tuple[str, str], tiny_prompt: Any
) -> None:
    bench = Bench(both.client)
    prompt = tiny_prompt(seed=1, width=64, height=64, steps=STEPS)
    plain = bench.run(prompt)
    before, events = bench.counters(), run_with_events(bench.client, with_model(prompt, compile_model()))
    ours = bench.finished(events.history, before)
    assert_same(ours, plain)
    assert_through_regions(ours, STEPS)
    texts = [text for node, text in events.texts if node == "sample-model-0"]
    notice = f"Resolute is installed twice: delete {copies[1]} or {copies[0]}\n"
    assert texts
    assert all(text.startswith(notice) for text in texts)
