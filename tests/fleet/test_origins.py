"""Pages of other web sites against ComfyUI's rule, at every kind of route, and the setting that replaces it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from .in_process import Reply, Site, alone, drawing

__all__ = ["alone"]
OTHER = {"Sec_Fetch_Site": "cross-site"}
EVIL = {"Origin": "https://evil.example"}
ROUTES: list[tuple[str, str, Any]] = [
    ("POST", "/prompt", {"prompt": drawing()}), ("POST", "/api/prompt", {"prompt": drawing()}),
    ("POST", "/queue", {"clear": True}), ("POST", "/interrupt", {}), ("POST", "/history", {"clear": True}),
    ("POST", "/upload/image", b""), ("POST", "/resolute/warm-up", {}), ("GET", "/history", b""), ("GET", "/view", b""),
    ("GET", "/object_info", b""), ("GET", "/resolute/fleet", b""), ("GET", "/no/such/route", b""),
    ("OPTIONS", "/prompt", b""),
]  # fmt: skip


def asked(folder: Path, method: str, path: str, body: Any = b"", cors: str = "", **headers: str) -> tuple[Reply, Site]:
    async def go() -> tuple[Reply, Site]:
        site = await Site(folder, enable_cors_header=cors).start()
        reply = await site.ask(method, path, body, **headers)
        await site.idle()
        return reply, site

    return asyncio.run(go())


@pytest.mark.parametrize("headers", [OTHER, EVIL, {"Origin": "null"}])
def test_every_route_refuses_another_site(tmp_path: Path, headers: dict[str, str]) -> None:
    async def go() -> Site:
        site = await Site(tmp_path).start()
        for method, path, body in ROUTES:
            reply = await site.ask(method, path, body, **headers)
            assert (reply.status, reply.json()["error"]["type"]) == (403, "other_site"), path
        return site

    site = asyncio.run(go())
    assert site.replica.bodies == []
    assert site.ingress._records.history() == {}


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:8188", "http://127.0.0.1:8188", 200),
        ("localhost:8188", "http://localhost:8188", 200),
        ("LOCALHOST:8188", "http://localhost", 200),  # core: a browser that names no port
        ("localhost", "http://localhost:3000", 200),
        ("localhost:8188", "http://localhost:3000", 403),
        ("localhost:8188", "http://127.0.0.1:8188", 403),
        ("[::1]:8188", "https://evil.example", 403),
        ("[::ffff:127.0.0.1]:8188", "https://evil.example", 403),
        ("0.0.0.0:8188", "https://evil.example", 403),
        ("127.0.0.1:8188", "http://127.0.0.1:wrong", 403),
        ("[::1:8188", "https://evil.example", 403),
        ("192.0.2.7:8188", "https://a.page.example", 200),  # any host but the loopback, as core
        ("", "https://a.page.example", 200),
        ("127.0.0.1:8188", "", 200),  # no browser
    ],
)
def test_a_different_origin_is_refused_where_the_host_is_a_loopback(
    tmp_path: Path, host: str, origin: str, status: int
) -> None:
    reply, _ = asked(tmp_path, "POST", "/prompt", {"prompt": drawing()}, Host=host, Origin=origin)
    assert reply.status == status


@pytest.mark.parametrize("site", ["same-origin", "same-site", "none"])
def test_a_page_of_the_fleets_own_is_answered(tmp_path: Path, site: str) -> None:
    reply, _ = asked(tmp_path, "GET", "/history", Sec_Fetch_Site=site, Origin="http://127.0.0.1:8188")
    assert reply.status == 200
    assert not any(name.startswith("access-control") for name in reply.headers)


@pytest.mark.parametrize("cors", ["*", "https://a.page.example"])
@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
def test_the_setting_replaces_the_rule_and_is_in_each_answer(
    tmp_path: Path, cors: str, method: str, path: str, body: Any
) -> None:
    reply, _ = asked(tmp_path, method, path, body, cors=cors, **OTHER, **EVIL)
    assert reply.status != 403
    assert reply.headers["access-control-allow-origin"] == cors
    assert reply.headers["access-control-allow-methods"] == "POST, GET, DELETE, PUT, OPTIONS, PATCH"
    assert reply.headers["access-control-allow-headers"] == "Content-Type, Authorization"
    assert reply.headers["access-control-allow-credentials"] == "true"


@pytest.mark.parametrize("cors", ["", "*"])
def test_options_are_answered_without_a_body(tmp_path: Path, cors: str) -> None:
    reply, site = asked(tmp_path, "OPTIONS", "/prompt", cors=cors)
    assert (reply.status, reply.body, site.replica.bodies) == (200, b"", [])


@pytest.mark.parametrize(
    ("cors", "headers", "first"),
    [
        ("", {}, "websocket.accept"),
        ("", {"Origin": "http://127.0.0.1:8188"}, "websocket.accept"),
        ("", OTHER, "websocket.close"),
        ("", EVIL, "websocket.close"),
        ("*", {**OTHER, **EVIL}, "websocket.accept"),
    ],
)
def test_a_websocket_follows_the_rule(tmp_path: Path, cors: str, headers: dict[str, str], first: str) -> None:
    async def go() -> list[Any]:
        site = await Site(tmp_path, enable_cors_header=cors).start()
        got = await site.connect("clientId=c", **headers)
        await site.disconnect()
        assert site.ingress._sockets == {}
        return got

    got = asyncio.run(go())
    assert got[0]["type"] == first
    assert (len(got) == 1) == (first == "websocket.close")
