"""While regions compile, the node counts them, the server answers, and Cancel stops between two of them.

Counts and seconds are the same wherever people read them: on the node, over HTTP, in the log, and on disk.
The server does not use inductor's graph cache, so that every compile takes its full time.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from scripts.pack import module
from scripts.server.client import Client
from scripts.server.events import Events
from scripts.server.process import ComfyServer

from .rig import (
    Bench,
    PromptDict,
    Run,
    assert_same,
    assert_through_regions,
    compile_model,
    run_with_events,
    with_model,
    without_decoder,
)

STEPS = 3
COMPILING = re.compile(r"compiling (\d+) of (\d+), \d+ s(?:, about \d+ s left|, first time only)?")
WAITING = ("compile", "load", "capture")  # segments of a run


@dataclass
class Story:
    """Three runs: a plain prompt, the compiled one cancelled while it compiles, and the compiled one to its end."""

    expected: Run
    cancelled: str = ""
    regions_when_cancelled: int = 0
    compiles_when_cancelled: int = 0  # may be one more: compiled, and not compared with the original yet
    resumed: Run | None = None
    counts_when_cancelled: dict[str, int] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)  # the cancelled one and the last one, over HTTP
    events: Events | None = None
    # The server's answers while the last prompt ran: compiled regions, all regions, running prompts.
    answers: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def progress(self) -> list[tuple[int, int]]:
        """(n, total) of the texts "compiling n of total, 3 s" on the Compile Model node, without repetitions."""
        assert self.events is not None
        texts = [text for name, text in self.events.texts if name == "sample-model-0"]
        found = [(int(found[1]), int(found[2])) for found in map(COMPILING.fullmatch, texts) if found]
        return list(dict.fromkeys(found))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiling") / "store"


@pytest.fixture(scope="module")
def cold_server(make_server: Any, store: Path) -> Iterator[ComfyServer]:
    """A server that has compiled nothing and uses only object files from inductor's cache."""
    server = make_server(environment={"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "RESOLUTE_STORE": str(store)})
    yield server
    server.stop()


@pytest.fixture(scope="module")
def cold(cold_server: ComfyServer) -> Bench:
    return Bench(cold_server.client)


@pytest.fixture(scope="module")
def prompt(tiny_prompt: Any) -> PromptDict:
    """Latents of a UNet of one level, which has fewer regions: one that is kept in a store compiles for longer."""
    whole = tiny_prompt(width=136, height=104, steps=STEPS, kind="small")
    return without_decoder(whole)


@pytest.fixture(scope="module")
def story(cold: Bench, store: Path, prompt: PromptDict) -> Story:
    story = Story(expected=cold.run(prompt))
    cancel_while_it_compiles(cold, with_model(prompt, compile_model()), story)
    story.counts_when_cancelled = counts(cold.client, store)
    watch_to_the_end(cold, with_model(prompt, compile_model()), story)
    story.runs = cold.client.get("/resolute/runs")["runs"][-2:]
    return story


def counts(client: Client, store: Path) -> dict[str, int]:
    """The number of compiled regions in each place."""
    cache = client.get("/resolute/cache")
    return {
        "disk": len(list(store.glob("*/*.region"))),
        "store": cache["store"]["regions"],
        "ready": cache["regions_ready"],
        "modules": sum(each["regions_compiled"] for each in cache["modules"]),
        "counters": cache["counters"]["region_compiles"],
    }


def regions(client: Client) -> tuple[int, int]:
    """Number of compiled regions, and of all regions, of the only module."""
    (module,) = client.get("/resolute/cache")["modules"]
    return module["regions_compiled"], module["regions"]


def cancel_while_it_compiles(cold: Bench, prompt: PromptDict, story: Story) -> None:
    # Wait for two: Cancel may also stop the comparison of a new region with eager, which the next prompt makes.
    story.cancelled = cold.cancel_once(prompt, lambda: len(cold.texts("compile")) >= 2)
    story.regions_when_cancelled, _ = regions(cold.client)
    story.compiles_when_cancelled = len(cold.texts("compile"))


def watch_to_the_end(cold: Bench, prompt: PromptDict, story: Story) -> None:
    before = cold.counters()

    def run() -> None:
        story.events = run_with_events(cold.client, prompt)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        story.answers.append((*regions(cold.client), len(cold.client.get("/queue")["queue_running"])))
        time.sleep(0.2)
    story.answers.append((*regions(cold.client), 0))
    assert story.events is not None, "the prompt after the cancelled one failed"
    story.resumed = cold.finished(story.events.history, before)


def test_cancelling_a_compile_interrupts_the_prompt(story: Story) -> None:
    assert story.cancelled == "The prompt was interrupted in node sample."


def test_a_cancel_stops_between_two_regions(story: Story) -> None:
    _, total, _ = story.answers[-1]
    assert 0 < story.regions_when_cancelled < total


def test_the_prompt_after_a_cancelled_one_compiles_the_rest_and_is_right(story: Story) -> None:
    assert story.resumed is not None
    assert_same(story.resumed, story.expected)
    assert_through_regions(story.resumed, STEPS)
    done, total, _ = story.answers[-1]
    assert done == total
    assert story.resumed.rise["region_compiles"] == total - story.regions_when_cancelled


def test_the_node_counts_the_regions_while_they_compile(story: Story) -> None:
    assert story.compiles_when_cancelled - story.regions_when_cancelled in (0, 1)
    first = story.compiles_when_cancelled + 1
    _, total, _ = story.answers[-1]
    assert story.progress == [(number, total) for number in range(first, total + 1)]


def test_the_report_and_the_queue_answer_while_a_region_compiles(story: Story) -> None:
    during = {done for done, total, running in story.answers if running and done < total}
    # If the answers waited for the forward, they would only show the numbers before or after it.
    assert during - {story.regions_when_cancelled}, story.answers


def test_all_places_have_the_same_count_after_a_cancel_and_at_the_end(cold: Bench, store: Path, story: Story) -> None:
    _, total, _ = story.answers[-1]
    assert set(story.counts_when_cancelled.values()) == {story.regions_when_cancelled}
    assert set(counts(cold.client, store).values()) == {total}
    kept = story.regions_when_cancelled
    end = rf"compiled {kept} regions? in .* s, stopped"
    assert re.search(end, story.runs[0]["status"]), story.runs[0]["status"]
    assert f"compiled {total - kept} regions in " in story.runs[1]["status"]


def test_all_places_have_the_same_seconds_of_a_wait(cold_server: ComfyServer, story: Story) -> None:
    time_text = module("compile_cache.telemetry.run_summary").time_text
    for run in story.runs:
        waited = run["waited"]
        assert sum(each["seconds"] for each in run["segments"] if each["kind"] in WAITING) == pytest.approx(
            waited, abs=0.01
        )
        assert f" in {time_text(waited)}" in run["status"]
        compiled = f"{run['counts']['region_compiles']} region compile"
        assert re.search(
            rf"Resolute: .*{compiled}.*waited {re.escape(time_text(waited))}(;|$)", cold_server.log(), re.M
        )
