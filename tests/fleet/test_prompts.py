"""What the ingress does with a replica's answers: refusals, losses, and a full queue. The replicas are scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, RequestCancelledError

from scripts.serving import config, current_router
from scripts.serving.files import Files
from scripts.serving.prompts import Prompts
from scripts.serving.records import Record, Records

from .conftest import tiny

LOADER = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "a.safetensors"}}
PROMPT = {**tiny(1), "loader": LOADER}
ENTRY = {
    "prompt": [0, "p", {}, {"client_id": "replica's"}, []],
    "outputs": {"9": {}},
    "status": {"status_str": "success"},
}
MISSING = {"error": {"type": "invalid", "message": "a.safetensors is not in the list"}, "node_errors": {"1": {}}}
ACCEPTED, DONE = ("accepted", "b", {"node_errors": {}}), ("entry", ENTRY)


class Replicas:
    """A handle and a router: each call goes to the first replica that it does not avoid, and gets the next answers."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.avoided: list[list[str]] = []
        self.decisions: dict[str, dict[str, Any]] = {}

    def state(self) -> list[dict[str, Any]]:
        return [{"replica": "a"}, {"replica": "b"}]

    def options(self, **_: Any) -> Replicas:
        return self

    @property
    def run(self) -> Replicas:
        return self

    def remote(self, body: Any, *, need: dict[str, Any], token: str) -> Call:
        self.avoided.append(need["avoid"])
        self.decisions[token] = {"replica": next(each for each in "ab" if each not in need["avoid"]), "why": "any"}
        return Call(self.answers.pop(0))


class Call:
    """One answer after the other, or the error that Serve raises."""

    def __init__(self, answers: list[Any]) -> None:
        self._answers = answers

    async def __aiter__(self) -> AsyncIterator[Any]:
        for answer in self._answers:
            if isinstance(answer, Exception):
                raise answer
            yield answer

    def cancel(self) -> None:
        self._answers = []


@pytest.fixture(autouse=True)
def _no_router() -> Iterator[None]:
    yield
    current_router._router = None


def run(folder: Path, *answers: Any) -> tuple[Replicas, tuple[int, Any], dict[str, Any], list[Any]]:
    """A prompt's way: the replicas, the first answer, the history, and what went over the websocket."""
    (folder / "main.py").write_text("")
    replicas, records, sent = Replicas(*answers), Records(folder / "x.sqlite"), []
    current_router.set_router(replicas)
    settings = config.from_plain({"comfyui": str(folder), "folder": str(folder)})

    async def go() -> tuple[int, Any]:
        prompts = Prompts(settings, replicas, records, Files(folder), lambda client, message: sent.append(message))
        record = Record("p", 7, {"prompt": PROMPT, "client_id": "mine"})
        assert records.add(record)
        prompt = prompts.start(record)
        assert prompt.task is not None
        await prompt.task
        return prompt.first.result()

    first = asyncio.run(go())
    return replicas, first, records.history(), sent


def test_an_entry_has_the_number_and_the_client_of_the_fleet(tmp_path: Path) -> None:
    _, first, history, _ = run(tmp_path, [ACCEPTED, DONE])
    assert first == (200, {"node_errors": {}})
    assert history["p"]["prompt"][0] == 7
    assert history["p"]["prompt"][3]["client_id"] == "mine"


def test_a_model_that_one_replica_lacks_is_found_on_the_other(tmp_path: Path) -> None:
    replicas, first, history, _ = run(tmp_path, [("refused", 400, MISSING)], [ACCEPTED, DONE])
    assert replicas.avoided == [[], ["a"]]
    assert (first[0], history["p"]["status"]["status_str"]) == (200, "success")


def test_what_every_replica_refuses_is_answered_with_comfyuis_words_and_frees_its_id(tmp_path: Path) -> None:
    replicas, first, history, _ = run(tmp_path, *[[("refused", 400, MISSING)]] * 2)
    assert len(replicas.avoided) == 2
    assert first == (400, MISSING)
    assert history == {}


@pytest.mark.parametrize("loss", [("lost", "ComfyUI ended."), RayActorError(), RequestCancelledError("r")])
def test_a_lost_prompt_runs_again_elsewhere_and_has_one_result(tmp_path: Path, loss: Any) -> None:
    replicas, _, history, _ = run(tmp_path, [("accepted", "a", {}), loss], [ACCEPTED, DONE])
    assert replicas.avoided == [[], ["a"]]
    assert history["p"]["status"]["status_str"] == "success"


def test_a_prompt_that_is_lost_twice_ends_with_an_error(tmp_path: Path) -> None:
    _, _, history, sent = run(tmp_path, *[[("accepted", "a", {}), ("lost", "ComfyUI ended.")]] * 2)
    ((kind, data),) = history["p"]["status"]["messages"]
    assert (kind, data["exception_message"]) == ("execution_error", "ComfyUI ended. It was started 2 times.")
    assert "execution_error" in [each["type"] for each in sent]


def test_a_full_queue_is_an_answer(tmp_path: Path) -> None:
    _, first, history, _ = run(tmp_path, [BackPressureError(num_queued_requests=1, max_queued_requests=1)])
    assert (first[0], first[1]["error"]["type"], history) == (503, "queue_full", {})


def test_a_file_that_cannot_be_kept_is_the_prompts_error(tmp_path: Path) -> None:
    place = {"filename": "a.png", "subfolder": "../..", "type": "output"}
    _, _, history, _ = run(tmp_path, [ACCEPTED, ("file", place, b"x", True), DONE])
    assert "could not keep a file" in history["p"]["status"]["messages"][0][1]["exception_message"]
