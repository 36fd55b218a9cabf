"""The count of regions and the seconds of a wait are the same wherever people read them.

After a cancel, a run and a restart:
on the node and in the panel (`status`), over HTTP, in the log, and on disk.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from scripts.errors import PromptError
from scripts.pack import module
from scripts.server.client import PROMPT_TIMEOUT, Client
from scripts.server.events import run_with_events
from scripts.server.process import ComfyServer

from .rig import PromptDict, node, with_model, without_decoder

TICK = re.compile(r"compiling (\d+) of (\d+), (\d+) s.*")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("counters") / "store"


@pytest.fixture(scope="module")
def start(make_server: Any, store: Path) -> Any:
    """A server that keeps what it compiles in a store of its own, and has only object files of earlier compiles."""

    def one() -> ComfyServer:
        server: ComfyServer = make_server(
            environment={"RESOLUTE_STORE": str(store), "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}
        )
        return server

    return one


@pytest.fixture(scope="module")
def prompt(tiny_prompt: Any) -> PromptDict:
    """Five regions: all of them would take minutes."""
    whole = tiny_prompt(width=136, height=104, steps=2)
    short = without_decoder(whole)
    left_out = node("ResoluteCompileModel", backend="inductor", leave_out="ResBlock, BasicTransformerBlock")
    return with_model(short, left_out)


class Figures:
    """What each place says after the last prompt."""

    def __init__(self, server: ComfyServer, store: Path, runs: int) -> None:
        """runs: how many sampling runs and decodes the prompt had."""
        self.cache = server.client.get("/resolute/cache")
        self.runs = server.client.get("/resolute/runs")["runs"][-runs:]
        self.log = [line for line in server.log().splitlines() if re.search(r"Resolute: .*( calls|region comp)", line)]
        self.disk = len(list(store.glob("*/*-*.json")))
        self.seconds = module("compile_cache.calls.run_summary").time_text

    def regions(self) -> int:
        """The count that all places agree on."""
        found = {
            "disk": self.disk,
            "store": self.cache["store"]["regions"],
            "ready": self.cache["regions_ready"],
            "modules": sum(each["regions_compiled"] for each in self.cache["modules"]),
            "counters": self.cache["counters"]["region_compiles"] + self.cache["counters"]["region_loads"],
        }
        assert len(set(found.values())) == 1, found
        return found["disk"]

    def waited(self) -> None:
        """The seconds of each run are the same on the node, in the panel's bar, over HTTP and in the log."""
        for run in self.runs:
            pieces = sum(
                piece["seconds"] for piece in run["segments"] if piece["kind"] in ("compile", "load", "capture")
            )
            assert pieces == pytest.approx(run["waited"], abs=0.01)
            if run["counts"]["region_compiles"]:
                said = self.seconds(run["waited"])
                assert f"compiled {run['counts']['region_compiles']} region" in run["status"]
                assert f" in {said}" in run["status"]
                assert any(line.endswith(f"waited {said}") or f"waited {said};" in line for line in self.log), self.log


def cancel_after(client: Client, prompt: PromptDict, regions: int) -> None:
    prompt_id = client.queue(prompt)
    deadline = time.monotonic() + PROMPT_TIMEOUT
    while client.get("/resolute/cache")["regions_ready"] < regions and time.monotonic() < deadline:
        time.sleep(0.05)
    client.interrupt()
    with pytest.raises(PromptError, match="interrupted"):
        client.wait(prompt_id)


@pytest.mark.long
def test_all_places_agree_after_a_cancel_a_run_and_a_restart(start: Any, store: Path, prompt: PromptDict) -> None:
    server = start()
    cancel_after(server.client, prompt, 1)
    cancelled = Figures(server, store, runs=1)
    kept = cancelled.regions()
    assert kept >= 1
    status = cancelled.runs[0]["status"]
    found = re.fullmatch(rf".*compiled {kept} regions? in .* s, stopped; {kept} of (\d+) are kept(\n.*)?", status)
    assert found, status
    total = int(found[1])
    assert f"{kept} region compiles" in cancelled.log[-1]
    cancelled.waited()

    events = run_with_events(server.client, prompt)
    texts = [text for _, text in events.texts]
    ticks = [(int(found[1]), int(found[2]), int(found[3])) for found in map(TICK.fullmatch, texts) if found]
    whole = Figures(server, store, runs=1)
    assert whole.regions() == total
    assert sum(run["counts"]["region_compiles"] for run in whole.runs) == total - kept
    whole.waited()
    assert {tick[1] for tick in ticks} == {total}
    assert [tick[0] for tick in ticks] == sorted(tick[0] for tick in ticks)
    assert ticks[0][0] == kept + 1  # the one that was cancelled is compiled anew
    assert ticks[-1][0] == total
    assert ticks[-1][2] <= whole.runs[-1]["waited"] + 0.5
    assert "sampling" in texts  # after the last region, not "compiling" to the end
    server.stop()

    again = start()
    again.client.run(prompt)
    restarted = Figures(again, store, runs=1)
    assert restarted.regions() == total
    assert restarted.cache["counters"]["region_compiles"] == 0
    restarted.waited()
    again.stop()
