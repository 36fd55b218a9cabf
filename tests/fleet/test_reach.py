"""Who can reach a real fleet: its ports, and pages of other sites, through Ray Serve's own proxy."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import aiohttp
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


def sockets(pids: set[int]) -> set[str]:
    found = set()
    for pid in pids:
        try:
            found |= {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
        except OSError:
            continue
    return {each[len("socket:[") : -1] for each in found if each.startswith("socket:[")}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's list of sockets")
def test_every_port_of_a_fleet_is_on_the_loopback(fleet: Fleet) -> None:
    """Ray's metrics and its other services too: `host` is 127.0.0.1."""
    assert fleet._process is not None
    own = sockets(processes(fleet._process.pid))
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    listening = [each[1].split(":") for each in lines if each[3] == _LISTEN and each[9] in own]
    ports = {int(port, 16) for _, port in listening}
    assert fleet.settings["port"] in ports
    assert len(ports) > 5, "it does not see Ray's ports"
    assert [(address, int(port, 16)) for address, port in listening if address not in _LOOPBACK] == []


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
