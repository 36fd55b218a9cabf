"""What takes minutes: 40 prompts of two models, and kills of a replica and of the ingress."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from scripts.errors import PromptError, ServerError
from scripts.places import ROOT
from scripts.ports import free_port
from scripts.server.process import ComfyServer
from scripts.setup import comfyui

from .conftest import LEVELS, Fleet, dumped, pixels, plain, tiny

pytestmark = pytest.mark.long
SIZES = [(128, 128), (160, 128), (128, 192), (192, 192), (256, 128), (128, 256), (192, 160), (160, 224)]
KINDS = ("sd", "sdxl")
LONG = 300  # steps: some seconds


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


class TestFaults:
    def test_a_killed_replica_is_replaced_by_one_that_compiles_nothing(self, fleet: Fleet) -> None:
        before = {each["replica"] for each in fleet.state()["replicas"]}
        prompt_id = fleet.client.queue(plain(1001, LONG))
        name = fleet.running(prompt_id)
        killed = fleet.replica(name)
        os.kill(killed["pid"], signal.SIGKILL)
        assert fleet.finished_once(prompt_id)["outputs"]["image"]["images"]
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
        assert fleet.post("/prompt", dumped(tiny(1), prompt_id=prompt_id))[0] == 400, "its id is free again"
        assert fleet.finished_once(prompt_id)["outputs"]["image"]["images"]


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


class TestWarmUp:
    """`POST /resolute/warm-up` on a replica, on all, and on a share."""

    def test_as_many_replicas_as_the_share_needs(self, fleet: Fleet) -> None:
        prompt = tiny(2000, "sd", 320, 128)
        status, answer, _ = fleet.post("/resolute/warm-up", dumped(prompt, replicas="share"))
        assert (status, len(answer["replicas"])) == (200, 1), "nobody used it so far, so one is enough"
        (name,) = answer["replicas"]
        fleet.wait(lambda: fleet.state()["warming"][name]["is_over"], "the warm-up is over")
        status, answer, headers = fleet.post("/prompt", dumped(prompt))
        fleet.client.wait(answer["prompt_id"])
        assert (headers["x-resolute-replica"], headers["x-resolute-why"].partition(":")[0]) == (name, "capture")
        status, answer, _ = fleet.post("/resolute/warm-up", dumped(prompt))
        assert (status, len(answer["replicas"])) == (200, 2)
        fleet.wait(lambda: all(each["is_over"] for each in fleet.state()["warming"].values()), "both are over")

    @pytest.mark.parametrize("wrong", ["some", 0, True, 1.5])
    def test_a_wrong_number_of_replicas_is_refused(self, fleet: Fleet, wrong: Any) -> None:
        status, answer, _ = fleet.post("/resolute/warm-up", dumped(tiny(1), replicas=wrong))
        assert (status, repr(wrong) in answer["error"]["message"]) == (400, True)


class TestScaling:
    """Serve's autoscaling by queue length, with a fleet of its own: one replica, and a second while prompts wait."""

    @pytest.fixture(scope="class")
    def growing(self, fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
        fleet.stop()  # three ComfyUIs at once are too many for two cores
        # imbalance: a prompt goes to an idle replica, and does not wait for the one that is warm.
        settings = {"replicas": 1, "max_replicas": 2, "target_ongoing": 2, "imbalance": 0, "ongoing": 8, "waiting": 8}
        times = {"grow_seconds": 1, "shrink_seconds": 5}
        made = Fleet(tmp_path_factory.mktemp("grow"), comfyui.ensure(ROOT), port=free_port(), **settings, **times)
        try:
            made.start()
            yield made
        finally:
            made.stop()

    def test_a_second_replica_comes_with_the_load_and_goes_when_its_prompt_is_over(self, growing: Fleet) -> None:
        prompts = [growing.client.queue(plain(seed, 20 * LONG)) for seed in range(5)]
        growing.wait(lambda: growing.ready() == 2, "a second replica is ready")
        (new,) = (each["replica"] for each in growing.state()["replicas"] if not each["load"])
        for prompt_id in prompts[1:]:
            growing.client.post("/queue", {"delete": [prompt_id]})
        last = growing.client.queue(plain(6, 4 * LONG))  # with the first: two prompts need one replica
        assert growing.running(last) == new
        growing.wait(lambda: len(growing.state()["replicas"]) == 1, "one of them goes", 300)
        # Serve chooses which one goes; its prompt ends first, and the other's goes on.
        assert growing.finished_once(last)["outputs"]["image"]["images"]
        growing.client.post("/interrupt", {"prompt_id": prompts[0]})
        with pytest.raises(PromptError, match="interrupted"):
            growing.client.wait(prompts[0], 60)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk")
class TestDisks:
    """Another fleet, whose store is on a disk of its own."""

    @pytest.mark.parametrize("options", ["size=16k", "ro"])
    def test_a_store_that_cannot_be_written_costs_no_picture(
        self, fleet: Fleet, tmp_path_factory: pytest.TempPathFactory, options: str
    ) -> None:
        fleet.stop()
        made = Fleet(tmp_path_factory.mktemp("disk"), comfyui.ensure(ROOT), replicas=1, port=free_port())
        store = made.folder / "regions"
        store.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(store)], check=True)
        try:
            made.start()
            for seed in (1, 2):
                history = made.finished_once(made.client.queue(tiny(seed, "small")))
                assert pixels(made.client, history).std() > 5
            first, second = made.state()["prompts"]
            assert (first["region_compiles"] > 0, second["region_compiles"]) == (True, 0)
            assert sum(each.stat().st_size for each in store.rglob("*") if each.is_file()) <= 16 * 1024
        finally:
            made.stop()
            subprocess.run(["umount", "--lazy", str(store)], check=True)
