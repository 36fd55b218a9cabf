"""Requests drawn by hypothesis against the ingress: no 500, no prompt without an end, and then a good prompt is right.

hypothesis shortens a failing sequence. Each sequence has an ingress and a folder of its own; after it the ingress
starts again on the same records.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .in_process import Reply, Site, alone
from .requests_drawn import LATEST, Drawn, requests
from .test_requests import works

__all__ = ["alone"]
_AT_ONCE = 20  # requests of a sequence


def play(sequence: list[Drawn]) -> Counter[int]:
    """Send a sequence to a new ingress; the good prompt after it must be right, also after a restart."""

    async def go(folder: Path) -> Counter[int]:
        site, latest, seen = await Site(folder).start(), "", Counter[int]()
        await site.connect("clientId=me")
        for each in sequence:
            reply = await ask(site, each, latest)
            assert (reply.error, reply.status < 500) == ("", True), (each, reply)
            seen[reply.status] += 1
            if each.path.endswith("/prompt") and each.method == "POST" and reply.status == 200:
                latest = reply.json()["prompt_id"]
        await site.idle()
        assert site.ingress._records.unfinished() == []
        await site.disconnect()
        await works(site)
        await works(await Site(folder).start())
        return seen

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(go(Path(folder)))


async def ask(site: Site, drawn: Drawn, latest: str) -> Reply:
    body = drawn.body.replace(LATEST.encode(), latest.encode())
    return await site.ask(
        drawn.method, drawn.path.replace(LATEST, latest), body, drawn.query.replace(LATEST, latest), **drawn.headers
    )


def fuzz(count: int, is_random: bool, caplog: pytest.LogCaptureFixture) -> Counter[int]:
    """Play sequences until `count` requests were sent. Returns how often each status came."""
    caplog.set_level(logging.ERROR, "ray.serve")
    found = Counter[int]()

    @settings(
        max_examples=-(-count // _AT_ONCE), deadline=None, database=None, derandomize=not is_random,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.lists(requests(), min_size=_AT_ONCE, max_size=_AT_ONCE))
    def one(sequence: list[Drawn]) -> None:
        found.update(play(sequence))

    one()
    assert [each.getMessage() for each in caplog.records] == [], "a prompt failed in the ingress"
    return found


def test_no_request_is_an_error_of_the_ingress(caplog: pytest.LogCaptureFixture) -> None:
    found = fuzz(300, False, caplog)
    assert sum(found.values()) >= 300
    assert {200, 400, 403, 404} <= set(found), "it draws good and wrong requests"


@pytest.mark.long
def test_twenty_thousand_requests(caplog: pytest.LogCaptureFixture) -> None:
    start = time.monotonic()
    found = fuzz(20_000, True, caplog)
    print(f"{sum(found.values())} requests in {time.monotonic() - start:.0f} s: {dict(sorted(found.items()))}")
    assert sum(found.values()) >= 20_000
