"""Two ComfyUI processes behind one address: ComfyUI's own API, the right pictures, and no prompt lost."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import urllib.error
import uuid
from typing import Any

import aiohttp
import pytest
from PIL import Image

from scripts.errors import PromptError
from scripts.server.client import Client

from .conftest import LEVELS, Fleet, PromptDict, dumped, pixels, plain, tiny

LONG = 150  # steps: some seconds


class TestPrompts:
    def test_the_second_prompt_of_each_model_goes_where_it_is_warm(self, fleet: Fleet) -> None:
        """And its picture is the one that a single ComfyUI makes: the one of the other replica, asked directly."""
        for model in (1, 2):
            fleet.client.run(tiny(1, "small", model=model))
        for model in (1, 2):
            status, answer, headers = fleet.post("/prompt", dumped(tiny(2, "small", model=model)))
            assert (status, headers["x-resolute-why"].partition(":")[0]) == (200, "capture")
            history = fleet.finished_once(answer["prompt_id"])
            report = next(each for each in fleet.state()["prompts"] if each["prompt_id"] == answer["prompt_id"])
            assert (report["region_compiles"], report["region_loads"]) == (0, 0)
            assert report["replica"] == headers["x-resolute-replica"]
        (other,) = (each for each in fleet.state()["replicas"] if each["replica"] != report["replica"])
        single = Client(other["comfyui"])
        expected = pixels(single, single.run(tiny(2, "small", model=model)))
        assert expected.std() > 5
        assert abs(pixels(fleet.client, history) - expected).max() <= LEVELS

    def test_a_killed_comfyui_runs_its_prompt_again(self, fleet: Fleet) -> None:
        prompt_id = fleet.client.queue(plain(1000, LONG))
        name = fleet.running(prompt_id)
        killed = fleet.replica(name)["comfyui_pid"]
        os.kill(killed, signal.SIGKILL)
        assert len(fleet.finished_once(prompt_id)["outputs"]["image"]["images"]) == 1
        fleet.wait(
            lambda: fleet.replica(name).get("comfyui_pid") not in (0, killed) and fleet.ready() == 2, "it is back"
        )

    def test_a_file_that_only_one_replica_has_is_found(self, fleet: Fleet) -> None:
        for name in sorted(each["replica"] for each in fleet.state()["replicas"]):
            folder = fleet.folder / "replicas" / name / "output"
            Image.new("RGB", (72, 64), (10, 200, 30)).save(folder / f"{name}.png")
            prompt_id = fleet.client.queue(
                {
                    "load": {"class_type": "LoadImage", "inputs": {"image": f"{name}.png [output]"}},
                    "save": {"class_type": "SaveImage", "inputs": {"images": ["load", 0], "filename_prefix": "own"}},
                }
            )
            assert fleet.finished_once(prompt_id)["outputs"]["save"]["images"]
            assert next(each for each in fleet.state()["prompts"] if each["prompt_id"] == prompt_id)["replica"] == name

    def test_a_full_fleet_refuses_a_prompt_and_a_cleared_queue_ends_those_that_wait(self, fleet: Fleet) -> None:
        taken, refused = list[str](), list[Any]()
        for seed in range(1100, 1112):  # two at each replica and four that wait are taken
            status, answer, _ = fleet.post("/prompt", dumped(plain(seed, 20 * LONG)))
            if status == 200:
                taken.append(answer["prompt_id"])
            else:
                refused.append((status, answer["error"]["type"]))
                break
        assert refused == [(503, "queue_full")]
        fleet.wait(lambda: len(fleet.client.get("/queue")["queue_running"]) == 2, "both replicas work", 60)
        assert len(fleet.client.get("/queue")["queue_pending"]) == len(taken) - 2
        fleet.client.post("/queue", {"delete": taken[-1:]})
        fleet.wait(lambda: taken[-1] in fleet.client.get(f"/history/{taken[-1]}"), "one is deleted", 60)
        fleet.client.post("/queue", {"clear": True})
        fleet.client.interrupt()
        for prompt_id in taken:
            with pytest.raises(PromptError, match="interrupted"):
                fleet.client.wait(prompt_id, 60)
        assert fleet.client.get("/queue") == {"queue_running": [], "queue_pending": []}


class TestTheApi:
    def test_a_body_over_the_limit_is_refused(self, fleet: Fleet) -> None:
        status, answer, _ = fleet.post("/prompt", b" " * (5 * 1024 * 1024))
        assert (status, answer["error"]["type"]) == (413, "too_large")

    def test_an_unknown_node_gets_comfyuis_own_error_and_keeps_no_id(self, fleet: Fleet) -> None:
        wrong = {"1": {"class_type": "NoSuchNode", "inputs": {}}}
        single = Client(fleet.state()["replicas"][0]["comfyui"])
        with pytest.raises(urllib.error.HTTPError) as caught:
            single.post("/prompt", {"prompt": wrong})
        for _ in range(2):
            status, answer, _ = fleet.post("/prompt", dumped(wrong, prompt_id="6f0f4a0e-0000-4000-8000-000000000001"))
            assert (status, answer) == (caught.value.code, json.loads(caught.value.read() or json.dumps(answer)))

    def test_what_is_the_same_everywhere_comes_from_any_replica(self, fleet: Fleet) -> None:
        assert "ResoluteCompileModel" in fleet.client.get("/api/object_info/ResoluteCompileModel")

    def test_an_uploaded_picture_can_be_loaded(self, fleet: Fleet) -> None:
        picture = io.BytesIO()
        Image.new("RGB", (72, 64), (10, 200, 30)).save(picture, "PNG")
        form = b'--b\r\nContent-Disposition: form-data; name="image"; filename="up.png"\r\n\r\n' + picture.getvalue()
        status, _, _ = fleet.post(
            "/upload/image", form + b"\r\n--b--\r\n", **{"Content-Type": "multipart/form-data; boundary=b"}
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
        body = dumped(plain(900, 1), prompt_id=str(uuid.uuid4()))
        fleet.client.wait(fleet.post("/prompt", body)[1]["prompt_id"])
        status, answer, _ = fleet.post("/prompt", body)
        assert (status, answer["error"]["type"]) == (400, "prompt_id_used")

    def test_an_entry_that_is_deleted_from_the_history_is_gone(self, fleet: Fleet) -> None:
        kept, deleted = (fleet.client.queue(plain(seed, 1)) for seed in (905, 906))
        for prompt_id in (kept, deleted):
            fleet.client.wait(prompt_id)
        fleet.client.post("/history", {"delete": [deleted]})
        assert (fleet.client.get(f"/history/{deleted}"), kept in fleet.client.get("/history")) == ({}, True)
        fleet.client.post("/history", {"clear": True})
        assert fleet.client.get("/history") == {}

    def test_progress_comes_over_the_websocket(self, fleet: Fleet) -> None:
        messages = asyncio.run(messages_of(fleet.client, plain(902, 3)))
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
        fleet.client.run(plain(904, 1))


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
