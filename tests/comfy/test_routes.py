"""`POST /resolute/warm-up` queues a prompt that warms up; `POST /resolute/free` frees captures without one. Routes that
read let others through.
"""

from __future__ import annotations

import asyncio
import http.client
import importlib
import json
import re
import sys
import threading
import time
import urllib.error
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from scripts.server.process import ComfyServer
from scripts.setup import comfyui

from .in_process import PACK, ROOT
from .rig import Bench, PromptDict, compiled, node

WITHIN = {"timeout": 300}


@pytest.fixture
def prompt(tiny_prompt: Any, seed: int) -> PromptDict:
    """A workflow with a new model that makes two pictures."""
    prompt: PromptDict = tiny_prompt(seed=seed, width=88, height=72, batch=2, steps=2)
    prompt["model"]["inputs"]["seed"] = prompt["vae"]["inputs"]["seed"] = 9000 + seed
    return compiled(prompt)


def warm_up(bench: Bench, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = bench.client.post("/resolute/warm-up", body)
    bench.client.wait(answer["prompt_id"], **WITHIN)
    return answer


@pytest.fixture
def handlers(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`nodes.routes` in this process, without a server."""
    found = {name: ModuleType(name) for name in ("server", "nodes", "folder_paths")}
    found["server"].PromptServer = None  # type: ignore[attr-defined]
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(comfyui.ensure(ROOT)))
    return importlib.import_module(f"{PACK}.nodes.routes")


def test_others_are_answered_while_a_report_waits(handlers: Any) -> None:
    """Just after a start a report waits for the import of inductor."""
    imported = threading.Event()

    async def answer() -> Any:
        report = asyncio.ensure_future(handlers._reads(lambda: {"waited": imported.wait(20)})(None))
        await asyncio.sleep(0)
        imported.set()  # the work of another request
        return await report

    assert json.loads(asyncio.run(answer()).body) == {"waited": True}


class TestWarmUp:
    def test_json_that_is_nested_too_deeply_is_refused(self, bench: Bench) -> None:
        with pytest.raises(urllib.error.HTTPError) as caught:
            bench.client.raw("/resolute/warm-up", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")
        assert caught.value.code == 400

    @pytest.mark.parametrize(
        ("route", "limit", "told"),
        [("warm-up", 16 << 20, "larger than 16 MiB"), ("free", 64 << 10, "larger than 64 KiB")],
    )
    @pytest.mark.parametrize("chunked", [False, True])
    def test_a_body_that_is_too_large_is_refused(
        self, bench: Bench, route: str, limit: int, told: str, chunked: bool
    ) -> None:
        body = b'{"prompt": "' + b"x" * limit + b'"}'
        connection = http.client.HTTPConnection(urlsplit(bench.client.url).netloc, timeout=60)
        # Without a length only the bytes that come tell how many there are.
        parts = (body[start : start + 65536] for start in range(0, len(body), 65536))
        connection.request("POST", f"/resolute/{route}", parts if chunked else body, encode_chunked=chunked)
        answer = connection.getresponse()
        assert answer.status == 413
        assert told in json.load(answer)["error"]["message"]
        connection.close()

    def test_an_error_has_the_form_of_cores_own(self, bench: Bench) -> None:
        errors = []
        for route, body in (("/resolute/warm-up", b'{"prompt": NaN}'), ("/prompt", b"{}")):
            with pytest.raises(urllib.error.HTTPError) as caught:
                bench.client.raw(route, body)
            assert caught.value.code == 400
            errors.append(json.load(caught.value))
        ours, core = errors
        assert ours.keys() == core.keys()
        assert ours["error"].keys() == core["error"].keys()
        assert "contains NaN" in ours["error"]["message"]

    def test_a_plan_names_a_checkpoint_and_sizes(self, bench: Bench, make_model: Callable[[str], str]) -> None:
        plan = {"checkpoint": make_model("sd15-mini-full-vae"), "sizes": "64x64, 72x88"}
        before = bench.counters()["graph_calls"]
        warm_up(bench, {"plan": plan})
        assert bench.counters()["graph_calls"] == before + 4

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ({}, "Send either"),
            ({"prompt": {"nodes": []}}, "not in API form"),
            ({"prompt": {"1": node("EmptyImage", width=64, height=64, batch_size=1, color=0)}}, "Nothing in this"),
            ({"prompt": {"1": node("EmptyImage")}, "sizes": "large"}, "'large' is not a size"),
            ({"prompt": {"1": node("EmptyImage")}, "sizes": 64}, "must be texts"),
            ({"plan": {"sizes": "64x64"}}, "A plan needs"),
            ({"plan": {"checkpoint": "a", "sizes": "64x64", "steps": 3}}, "A plan has no 'steps'"),
            ({"plan": {"checkpoint": "a", "sizes": "large"}}, "'large' is not a size"),
            ({"plan": {"checkpoint": "a", "sizes": "64x64", "vae": "no"}}, "must be true or false, not 'no'"),
            ({"plan": {"checkpoint": "absent.safetensors", "sizes": "64x64"}}, "absent.safetensors"),
        ],
    )
    def test_a_request_that_cannot_be_served_is_refused_with_a_sentence(
        self, bench: Bench, body: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(urllib.error.HTTPError) as caught:
            bench.client.post("/resolute/warm-up", body)
        assert caught.value.code == 400
        assert re.search(message, json.dumps(json.load(caught.value)))


class TestFree:
    def test_while_a_prompt_runs_it_is_left_for_the_end_of_that(
        self, server: ComfyServer, bench: Bench, prompt: PromptDict
    ) -> None:
        before = server.log().count("Resolute: freed")
        running = bench.client.queue(prompt)
        while not any(running in entry for entry in bench.client.get("/queue")["queue_running"]):
            time.sleep(0.01)
        answers = [bench.client.post("/resolute/free", {}) for _ in range(3)]
        assert {answer["state"] for answer in answers} <= {"later", "nothing"}  # a slow machine may have ended it
        run = bench.client.wait(running)
        assert len(bench.client.images(run)) == 2
        later = any(answer["state"] == "later" for answer in answers)
        freed = server.log().count("Resolute: freed") - before
        assert freed == later + sum(answer["state"] == "nothing" for answer in answers)

    def test_nothing_is_queued_and_the_next_prompt_keeps_what_comfyui_cached(
        self, bench: Bench, prompt: PromptDict
    ) -> None:
        bench.client.run(prompt)
        answers = [bench.client.post("/resolute/free") for _ in range(2)]  # no body is needed
        assert [(answer["state"], answer["bytes"], answer["text"]) for answer in answers] == [
            ("nothing", 0, "No captures to free.")
        ] * 2
        again = bench.client.run(prompt)
        assert set(dict(again["status"]["messages"])["execution_cached"]["nodes"]) == set(prompt)

    def test_the_node_runs_in_each_prompt_also_if_its_output_is_not_connected(
        self, server: ComfyServer, bench: Bench, tiny_prompt: Any, seed: int
    ) -> None:
        before = server.log().count("Resolute: freed")
        for number in (1, 2):  # the second time ComfyUI has everything else in its cache
            bench.run({**tiny_prompt(seed=seed, steps=1), "free": node("ResoluteFree", any=["sample", 0])})
            assert server.log().count("Resolute: freed") == before + number


class TestNearestReady:
    def asked(self, width: int, height: int, seed: int) -> PromptDict:
        asked = {"preset": "custom", "width": width, "height": height, "multiple": "8", "use": "nearest ready"}
        return {
            "size": node("ResoluteResolution", **asked),
            "image": node("EmptyImage", width=["size", 0], height=["size", 1], batch_size=1, color=seed),
            "save": node("SaveImage", images=["image", 0], filename_prefix="size"),
        }

    def size(self, bench: Bench, width: int, height: int, seed: int) -> tuple[int, int]:
        """The output of Resolution: the size of an image that is made with it."""
        (picture,) = bench.run(self.asked(width, height, seed)).images
        return picture.shape[1], picture.shape[0]

    def test_while_no_other_size_is_ready_the_nodes_stay_cached(self, bench: Bench, seed: int) -> None:
        assert self.size(bench, 64, 2048, seed) == (64, 2048)
        history = bench.client.run(self.asked(64, 2048, seed))
        assert set(dict(history["status"]["messages"])["execution_cached"]["nodes"]) == {"size", "image", "save"}
