"""Two ComfyUI processes behind one address: ComfyUI's own API, the right pictures, and no prompt lost."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections import Counter
from typing import Any

import aiohttp
import numpy
import pytest
from PIL import Image

from scripts.support.client import Client
from scripts.support.errors import PromptError, ServerError
from scripts.support.server import ComfyServer

from .conftest import Fleet, PromptDict, plain, refusal, tiny

SIZES = [(128, 128), (160, 128), (128, 192), (192, 192), (256, 128), (128, 256), (192, 160), (160, 224)]
KINDS = ("sd", "sdxl")
LEVELS = 1  # of 255, as in the other server tests
LONG = 300  # steps: some seconds


def pixels(client: Client, history: dict[str, Any]) -> Any:
    (content,) = client.images(history)
    return numpy.asarray(Image.open(io.BytesIO(content)).convert("RGB")).astype(int)


def post(fleet: Fleet, path: str, content: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(fleet.client.url + path, data=content, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, dict(answer.headers)
    except urllib.error.HTTPError as error:
        return refusal(error)


def finished_once(fleet: Fleet, prompt_id: str) -> dict[str, Any]:
    """The prompt's entry, after checking that exactly one report and one entry of it are there."""
    history = fleet.client.wait(prompt_id, 300)
    assert Counter(each["prompt_id"] for each in fleet.state()["prompts"])[prompt_id] <= 1
    assert prompt_id not in str(fleet.client.get("/queue"))
    return history


class TestTheApi:
    def test_a_prompt_without_a_workflow_is_refused_as_comfyui_does(self, fleet: Fleet) -> None:
        status, answer = post(fleet, "/prompt", b"{}")
        assert (status, answer["error"]["type"], answer["node_errors"]) == (400, "no_prompt", {})

    def test_a_body_that_is_no_json_is_refused(self, fleet: Fleet) -> None:
        assert post(fleet, "/prompt", b"{")[0] == 400
        assert post(fleet, "/prompt", b"[]")[0] == 400

    def test_a_body_over_the_limit_is_refused(self, fleet: Fleet) -> None:
        status, answer = post(fleet, "/prompt", b" " * (5 * 1024 * 1024))
        assert (status, answer["error"]["type"]) == (413, "too_large")

    def test_an_unknown_node_gets_comfyuis_own_error_and_keeps_no_id(self, fleet: Fleet) -> None:
        prompt_id = str(uuid.uuid4())
        body = {"prompt": {"1": {"class_type": "NoSuchNode", "inputs": {}}}, "prompt_id": prompt_id}
        for _ in range(2):
            with pytest.raises(urllib.error.HTTPError) as caught:
                fleet.client.post("/prompt", body)
            status, answer = refusal(caught.value)
            assert (status, "NoSuchNode" in answer["error"]["message"]) == (400, True)

    @pytest.mark.parametrize("wrong", ["x", 1, "A" * 36])
    def test_an_id_that_is_none_is_refused(self, fleet: Fleet, wrong: Any) -> None:
        with pytest.raises(urllib.error.HTTPError) as caught:
            fleet.client.post("/prompt", {"prompt": tiny(1), "prompt_id": wrong})
        assert refusal(caught.value)[1]["error"]["type"] == "invalid_prompt_id"

    def test_an_unknown_id_has_no_history(self, fleet: Fleet) -> None:
        assert fleet.client.get(f"/history/{uuid.uuid4()}") == {}

    @pytest.mark.parametrize("name", ["../ingress/prompts.sqlite", "/etc/passwd", ""])
    def test_a_file_outside_is_refused(self, fleet: Fleet, name: str) -> None:
        with pytest.raises(urllib.error.HTTPError) as caught:
            fleet.client.raw(f"/view?filename={name}")
        assert caught.value.code == 400

    def test_what_is_the_same_everywhere_comes_from_any_replica(self, fleet: Fleet) -> None:
        assert "ResoluteCompileModel" in fleet.client.get("/api/object_info/ResoluteCompileModel")

    def test_an_uploaded_picture_can_be_loaded(self, fleet: Fleet) -> None:
        picture = io.BytesIO()
        Image.new("RGB", (72, 64), (10, 200, 30)).save(picture, "PNG")
        form = b'--b\r\nContent-Disposition: form-data; name="image"; filename="up.png"\r\n\r\n' + picture.getvalue()
        status, _ = post(
            fleet, "/upload/image", form + b"\r\n--b--\r\n", **{"Content-Type": "multipart/form-data; boundary=b"}
        )
        assert status == 200
        history = fleet.client.run(
            {
                "load": {"class_type": "LoadImage", "inputs": {"image": "up.png"}},
                "save": {"class_type": "SaveImage", "inputs": {"images": ["load", 0], "filename_prefix": "up"}},
            }
        )
        assert pixels(fleet.client, history)[0, 0].tolist() == [10, 200, 30]

    def test_a_second_use_of_an_id_is_refused(self, fleet: Fleet) -> None:
        body = {"prompt": tiny(900), "prompt_id": str(uuid.uuid4())}
        fleet.client.wait(fleet.client.post("/prompt", body)["prompt_id"])
        with pytest.raises(urllib.error.HTTPError) as caught:
            fleet.client.post("/prompt", body)
        assert refusal(caught.value)[1]["error"]["type"] == "prompt_id_used"

    def test_an_answer_says_where_a_prompt_went_and_why(self, fleet: Fleet) -> None:
        request = urllib.request.Request(
            fleet.client.url + "/prompt", data=b'{"prompt": ' + dumped(tiny(901)) + b"}", method="POST"
        )
        with urllib.request.urlopen(request) as answer:
            headers = dict(answer.headers)
        assert headers["X-Resolute-Replica".lower()] in {each["replica"] for each in fleet.state()["replicas"]}
        assert headers["x-resolute-why"].partition(":")[0] in ("any", "model", "regions", "capture")

    def test_progress_comes_over_the_websocket(self, fleet: Fleet) -> None:
        messages = asyncio.run(messages_of(fleet.client, tiny(902, steps=3)))
        kinds = [each["type"] for each in messages]
        assert kinds[0] == "status"
        assert {"execution_start", "executing", "progress", "executed", "execution_success"} <= set(kinds)
        (picture,) = next(each for each in messages if each["type"] == "executed")["data"]["output"]["images"]
        assert fleet.client.raw(f"/view?filename={picture['filename']}&subfolder={picture['subfolder']}&type=output")

    def test_an_interrupted_prompt_says_so(self, fleet: Fleet) -> None:
        prompt_id = fleet.client.queue(plain(903, LONG))
        fleet.running(prompt_id)
        fleet.client.post("/interrupt", {"prompt_id": prompt_id})
        with pytest.raises(PromptError, match="interrupted"):
            fleet.client.wait(prompt_id, 60)
        fleet.client.run(tiny(904))


async def messages_of(client: Client, prompt: PromptDict) -> list[dict[str, Any]]:
    address = f"{client.url.replace('http', 'ws', 1)}/ws?clientId={client.client_id}"
    found: list[dict[str, Any]] = []
    async with aiohttp.ClientSession() as session, session.ws_connect(address) as socket:
        prompt_id = await asyncio.to_thread(client.queue, prompt)
        async for message in socket:
            if message.type == aiohttp.WSMsgType.TEXT:
                found.append(message.json())
                if found[-1]["type"] == "execution_success" and found[-1]["data"]["prompt_id"] == prompt_id:
                    return found
    raise AssertionError(f"the websocket closed after {found}")


def dumped(prompt: PromptDict) -> bytes:
    return json.dumps(prompt).encode()


@pytest.mark.long
class TestForty:
    """40 prompts of eight sizes and two models from four clients."""

    def test_pictures_are_those_of_a_single_server_and_most_prompts_are_warm(
        self, fleet: Fleet, single: ComfyServer
    ) -> None:
        prompts = [tiny(seed, KINDS[seed % 2], *SIZES[(seed // 2) % 8]) for seed in range(40)]
        before = len(fleet.state()["prompts"])
        histories: list[Any] = [None] * 40

        def client(number: int) -> None:
            for index in range(number, 40, 4):
                histories[index] = fleet.client.run(prompts[index])

        threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(histories), "a prompt failed"

        names = [
            (each["subfolder"], each["filename"])
            for found in histories
            for each in fleet.client.outputs(found, "images")
        ]
        assert len(set(names)) == 40, "two pictures have one name"
        reports = fleet.state()["prompts"][before:]
        assert len({each["prompt_id"] for each in reports}) == len(reports) == 40
        assert len({each["replica"] for each in reports}) == 2, "one replica did all the work"
        cold = [each for each in reports if each["region_compiles"] + each["region_loads"]]
        print(f"warm: {40 - len(cold)} of 40; why: {Counter(each['why'].partition(':')[0] for each in reports)}")
        assert len(cold) <= 4  # each model once at each replica
        for index in range(16, 32, 3):  # every size and model has run before: the compiled code is the same
            expected = pixels(single.client, single.client.run(prompts[index]))
            assert expected.std() > 5
            assert abs(pixels(fleet.client, histories[index]) - expected).max() <= LEVELS


@pytest.mark.long
class TestFaults:
    def test_a_killed_comfyui_runs_its_prompt_again(self, fleet: Fleet) -> None:
        prompt_id = fleet.client.queue(plain(1000, LONG))
        name = fleet.running(prompt_id)
        killed = fleet.replica(name)["comfyui_pid"]
        os.kill(killed, signal.SIGKILL)
        history = finished_once(fleet, prompt_id)
        assert history["outputs"]["image"]["images"]
        fleet.wait(
            lambda: fleet.replica(name).get("comfyui_pid") not in (0, killed) and fleet.ready() == 2, "it is back"
        )

    def test_a_killed_replica_is_replaced_by_one_that_compiles_nothing(self, fleet: Fleet) -> None:
        before = {each["replica"] for each in fleet.state()["replicas"]}
        prompt_id = fleet.client.queue(plain(1001, LONG))
        name = fleet.running(prompt_id)
        killed = fleet.replica(name)
        os.kill(killed["pid"], signal.SIGKILL)
        assert finished_once(fleet, prompt_id)["outputs"]["image"]["images"]
        fleet.wait(lambda: not alive(killed["comfyui_pid"]), "its ComfyUI ended too", 30)
        fleet.wait(lambda: fleet.ready() == 2 and not fleet.replica(name), "another replica is ready")
        (new,) = (each for each in fleet.state()["replicas"] if each["replica"] not in before)
        assert new["shapes"], "it was not warmed up"
        assert (new["counters"]["region_compiles"], new["counters"]["region_loads"] > 0) == (0, True)

    def test_a_killed_ingress_loses_no_prompt_and_no_history(self, fleet: Fleet) -> None:
        old = fleet.client.queue(plain(1002, 1))
        fleet.client.wait(old)
        prompt_id = fleet.client.queue(plain(1003, LONG))
        fleet.running(prompt_id)
        killed = fleet.state()["pid"]
        os.kill(killed, signal.SIGKILL)
        fleet.wait(lambda: answering(fleet) not in (0, killed), "the ingress is back", 120)
        assert old in fleet.client.get(f"/history/{old}")
        with pytest.raises(urllib.error.HTTPError):
            fleet.client.post("/prompt", {"prompt": tiny(1), "prompt_id": prompt_id})
        assert finished_once(fleet, prompt_id)["outputs"]["image"]["images"]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def answering(fleet: Fleet) -> int:
    """The process of the ingress; 0 while none answers."""
    try:
        return int(fleet.state()["pid"])
    except (OSError, ServerError):
        time.sleep(0.2)
        return 0
