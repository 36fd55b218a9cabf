"""Who can reach a real fleet: its ports, and pages of other sites, through Ray Serve's own proxy."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import aiohttp
import grpc
import pytest
from yarl import URL

from .conftest import Fleet

EVIL = {"Origin": "https://evil.example"}
_LISTEN = "0A"
_LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def processes(root: int) -> set[int]:
    """A process and all that it started, directly or not."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it ended
            continue
    found = {root}
    while more := {each for each, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def owners(pids: set[int]) -> dict[str, int]:
    """The process of each open socket, by the socket's inode."""
    found = {}
    for pid in pids:
        try:
            links = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        found |= {each[len("socket:[") : -1]: pid for each in links if each.startswith("socket:[")}
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's list of sockets")
def test_the_ports_of_a_fleet_are_on_the_loopback_or_ask_for_the_token(fleet: Fleet) -> None:
    """Ray's metrics too: `host` is 127.0.0.1. Serve fixes the address of a port of each deployment's replica."""
    assert fleet._process is not None
    own = owners(processes(fleet._process.pid))
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    listening = [(*each[1].split(":"), own[each[9]]) for each in lines if each[3] == _LISTEN and each[9] in own]
    ports = {int(port, 16) for _, port, _ in listening}
    assert fleet.settings["port"] in ports
    assert len(ports) > 5, "it does not see Ray's ports"
    reachable = [(int(port, 16), pid) for address, port, pid in listening if address not in _LOOPBACK]
    names = [Path(f"/proc/{pid}/cmdline").read_text().partition(":fleet:")[0] for _, pid in reachable]
    assert names == ["ray::ServeReplica"] * 3, "of the ingress and of two replicas"
    for port, _ in reachable:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
            with pytest.raises(grpc.RpcError) as caught:
                call(b"", timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_page_of_another_site_is_refused_by_every_door(fleet: Fleet) -> None:
    status, answer, _ = fleet.post("/api/history", b'{"clear": true}', **EVIL)
    assert (status, answer["error"]["type"]) == (403, "other_site")

    async def opened(headers: dict[str, str]) -> int:
        address = f"{fleet.client.url.replace('http', 'ws', 1)}/ws"
        async with aiohttp.ClientSession() as session:
            try:
                async with session.ws_connect(address, headers=headers) as socket:
                    return int((await socket.receive_json())["type"] == "status")
            except aiohttp.WSServerHandshakeError as error:
                return error.status

    assert [asyncio.run(opened(each)) for each in (EVIL, {"Sec-Fetch-Site": "cross-site"}, {})] == [403, 403, 1]


def test_a_path_does_not_lead_to_other_routes_of_a_replica(fleet: Fleet) -> None:
    async def asked(path: str) -> int:
        # aiohttp would resolve the dots; `encoded` sends what is there.
        address = URL(fleet.client.url + path, encoded=True)
        async with aiohttp.ClientSession() as session, session.get(address) as answer:
            return answer.status

    assert asyncio.run(asked("/models/..%2Finternal%2Flogs")) == 400
    assert asyncio.run(asked("/models/checkpoints")) == 200
