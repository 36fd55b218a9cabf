"""Node, badge, panel, log, report, routes and ComfyUI's history tell the same numbers, each thing counted once.

After a cancel, a run, a second model, a ControlNet and a restart, on one server and then on a second one.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from scripts.errors import PromptError
from scripts.pack import module
from scripts.server.client import PROMPT_TIMEOUT, Client
from scripts.server.events import Events
from scripts.server.process import ComfyServer

from .matrix.controlling import all_compiled, controlled
from .rig import Bench, PromptDict, compiled, node, run_with_events

STEPS = 2
NODES = {"unet": "sample-model-0", "vae_decode": "compiled-vae", "controlnet": "compiled-net"}
COUNTED = ("replays", "graph_calls", "eager_calls", "captures", "region_compiles", "verifications")
LOGGED = {"region_compiles": r"(\d+) region compiles?", "graph_calls": r"(\d+) calls? through regions"}


@dataclass
class Told:
    """The words of each place about a prompt, or about a start where no prompt ran."""

    events: Events
    log: str
    cache: dict[str, Any]
    runs: list[dict[str, Any]]
    report: str
    disk: int
    rise: dict[str, int] = field(default_factory=dict)

    @property
    def node_texts(self) -> dict[str, str]:
        return dict(self.events.texts)

    def sent(self, kind: str) -> list[dict[str, Any]]:
        """The data of our messages of this kind."""
        sent = [each["data"] for each in self.events.messages if each["type"] == "resolute"]
        return [each for each in sent if each["kind"] == kind]

    @property
    def badge(self) -> list[dict[str, Any]]:
        """Its messages while something compiles."""
        return self.sent("working")


class Story:
    """Runs prompts on servers that share one store, and notes what they tell."""

    def __init__(self, start: Callable[[], ComfyServer], store: Path) -> None:
        self._start, self._store = start, store
        self.server = start()

    def restart(self, models: int) -> Told:
        self.server.stop()
        self.server = self._start()
        ends = time.monotonic() + PROMPT_TIMEOUT
        while self.server.log().count("compiles expected") < models and time.monotonic() < ends:
            time.sleep(0.2)
        return self._told(Events(), 0, "", {})

    def run(self, prompt: PromptDict, cancel: Callable[[Bench], bool] | None = None) -> Told:
        prompt = {**prompt, "report": node("ResoluteReport", any=["decode", 0])}
        client, begun = self.server.client, len(self.server.log())
        before = Bench(client).counters()
        if cancel is not None:
            threading.Thread(target=self._cancel_once, args=(cancel,), daemon=True).start()
        events = _events(client, prompt)
        return self._told(events, begun, str(events.history["prompt"][1]), before)

    def _cancel_once(self, reached: Callable[[Bench], bool]) -> None:
        while not reached(Bench(self.server.client)):
            time.sleep(0.02)
        self.server.client.interrupt()

    def _told(self, events: Events, begun: int, prompt_id: str, before: dict[str, Any]) -> Told:
        client = self.server.client
        cache, runs = client.get("/resolute/cache"), client.get("/resolute/runs")["runs"]
        return Told(
            events=events,
            log=self.server.log()[begun:],
            cache=cache,
            runs=[run for run in runs if run["prompt_id"] == prompt_id],
            report=client.get("/resolute/report")["text"],
            disk=len(list(self._store.glob("*/*.region"))),
            rise={name: cache["counters"][name] - before.get(name, 0) for name in COUNTED},
        )


def _events(client: Client, prompt: PromptDict) -> Events:
    """Of a prompt that may be cancelled: its messages come nevertheless."""
    real = client.wait

    def wait(prompt_id: str, timeout: float = PROMPT_TIMEOUT) -> Any:
        try:
            return real(prompt_id, timeout)
        except PromptError:
            return client.get(f"/history/{prompt_id}")[prompt_id]

    client.wait = wait  # type: ignore[method-assign]
    return run_with_events(client, prompt)


@pytest.fixture(scope="module")
def told(make_server: Any, tmp_path_factory: pytest.TempPathFactory, tiny_prompt: Any) -> dict[str, Told]:
    store = tmp_path_factory.mktemp("numbers") / "store"
    story = Story(lambda: make_server(environment={"RESOLUTE_STORE": str(store)}), store)

    def prompt(**given: Any) -> PromptDict:
        whole: PromptDict = tiny_prompt(**{"width": 136, "height": 104, "steps": STEPS, "kind": "small", **given})
        return whole

    other = compiled(prompt())
    other["model"]["inputs"]["seed"] = 5
    net = all_compiled(controlled(prompt(kind="sd"), "net"), "inductor")
    found = {
        "cancelled": story.run(compiled(prompt()), lambda bench: len(bench.texts("compile")) >= 2),
        "first": story.run(compiled(prompt())),
        "batch": story.run(compiled(prompt(batch=2))),
        "second model": story.run(other),
        "another model": story.run(compiled(prompt(kind="sd"))),
        "ControlNet": story.run(net),
        "restart": story.restart(models=4),
        "after it": story.run(compiled(prompt(width=264))),
    }
    story.server.stop()
    return found


PROMPTS = ["cancelled", "first", "batch", "second model", "another model", "ControlNet", "after it"]
EACH = pytest.mark.parametrize("when", [*PROMPTS, "restart"])
SIZES = {"cancelled": 0, "first": 1, "batch": 2, "second model": 2, "another model": 3, "ControlNet": 3}
SIZES |= {"restart": 3, "after it": 4}


@EACH
def test_each_place_has_the_regions_that_are_kept(told: dict[str, Told], when: str) -> None:
    now = told[when]
    ready = now.cache["regions_ready"]
    counters = now.cache["counters"]
    assert ready == counters["region_compiles"] + counters["region_loads"] == now.cache["store"]["regions"] == now.disk
    assert f"\n{ready} region{'' if ready == 1 else 's'}, " in now.report
    if now.badge:
        last = now.badge[-1]
        logged = re.findall(r"Resolute: (\d+) of (\d+) regions are compiled", now.log)
        assert logged[-1] == (str(last["done"]), str(last["total"]))
        assert len(set(logged)) == len(logged), "each is logged once"
        totals = [each["total"] for each in now.badge]
        assert totals == sorted(totals), "it may grow once, when ComfyUI executes the other compile node"


@EACH
def test_each_place_has_the_sizes_that_are_ready(told: dict[str, Told], when: str) -> None:
    now = told[when]
    rows = [  # of the panel's tables
        {(model["model"], shape["size"]) for shape in model["shapes"] if shape["state"] == "memory"}
        for model in now.cache["models"]
        if model["name"] == "BASE"
    ]
    sizes = now.cache["sizes_ready"]
    assert sizes == sum(map(len, rows)) == SIZES[when]
    assert re.search(rf" regions?, {sizes} size{'' if sizes == 1 else 's'} ready\n", now.report)
    if when == "restart":
        logged = re.findall(r"regions are there for (\d+) sizes of BASE, 0 compiles expected", now.log)
        assert sorted(map(int, logged)) == sorted(map(len, rows))


@EACH
def test_each_place_has_the_result_of_a_run(told: dict[str, Told], when: str) -> None:
    now = told[when]
    sent = [each["run"] for each in now.sent("run")]
    assert [each["status"] for each in sent] == [each["status"] for each in now.runs]
    for run in now.runs:
        assert now.node_texts[NODES[run["role"]]].splitlines() == run["status"].splitlines()
        assert f"{run['model']} {run['role']}: {run['status']}".replace("\n", "; ") in now.report
        if compiles := run["counts"]["region_compiles"]:
            said = re.search(rf"compiled {compiles} regions? in ([\d.]+ m?s)", run["status"])
            assert said is not None and said[1] in _texts(run["waited"])
            assert f" {compiles} region compile{'s' * (compiles > 1)}, waited {said[1]}" in now.log


def _texts(seconds: float) -> set[str]:
    """As text; the route's figure was rounded before."""
    time_text = module("compile_cache.telemetry.run_summary").time_text
    return {time_text(seconds + tiny) for tiny in (-0.0001, 0.0, 0.0001)}


@pytest.mark.parametrize("when", PROMPTS)
def test_what_a_prompt_did_is_counted_once_in_its_runs(told: dict[str, Told], when: str) -> None:
    now = told[when]
    together = Counter[str]()
    for run in now.runs:
        together.update({name: run["counts"][name] for name in COUNTED})
    assert {name: together[name] for name in COUNTED} == now.rise
    logged = Counter[str]()
    for line in re.findall(r"Resolute: (.*(?:calls? through regions|region compiles?).*)", now.log):
        logged.update({name: int(found[1]) for name, text in LOGGED.items() if (found := re.search(text, line))})
    sampled = [run for run in now.runs if run["role"] != "vae_decode" or run["waited"] >= 0.05]
    assert logged["region_compiles"] == now.rise["region_compiles"]
    assert logged["graph_calls"] == sum(run["counts"]["graph_calls"] for run in sampled)
    history = now.events.history.get("outputs", {}).get("report")
    if history:
        ready = f"{now.cache['regions_ready']} regions?, {now.cache['sizes_ready']} "
        assert re.search(ready, history["text"][0])
        assert re.search(f"{now.cache['counters']['graph_calls']} calls? through regions", history["text"][0])


def test_a_cancel_keeps_what_the_badge_counts(told: dict[str, Told]) -> None:
    (run,) = told["cancelled"].runs
    ready = told["cancelled"].cache["regions_ready"]
    total = told["cancelled"].badge[-1]["total"]
    assert 0 < ready < total
    assert run["stopped"] and run["status"].endswith("stopped")
    assert ready <= told["first"].badge[0]["done"] < total, "a region that was being compiled is kept too"
    compiles = sum(told[when].rise["region_compiles"] for when in ("cancelled", "first"))
    assert compiles <= told["first"].badge[-1]["total"], "and none is compiled again"


def test_regions_of_another_model_are_not_counted_as_missing(told: dict[str, Told]) -> None:
    assert told["second model"].badge == []
    assert told["second model"].rise["region_compiles"] == 0
    for when in ("another model", "ControlNet"):
        first = told[when].badge[0]
        assert first["total"] - first["done"] == told[when].rise["region_compiles"] > 0
