"""No request ends the fleet for everybody, or reaches more than the fleet's own routes and folders."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from .in_process import Reply, Site, alone, drawing, picture

__all__ = ["alone"]
GOOD = drawing()
ID = "6f0f4a0e-0000-4000-8000-000000000001"


def asked(folder: Path, method: str, path: str, body: Any = b"", query: str = "") -> tuple[Reply, Site]:
    """One request to a new ingress, which then works as before."""

    async def go() -> tuple[Reply, Site]:
        site = await Site(folder).start()
        reply = await site.ask(method, path, body, query)
        await works(site)
        await works(await Site(folder).start())
        return reply, site

    return asyncio.run(go())


async def works(site: Site) -> None:
    """Its lists answer, and a good prompt has its entry and its picture."""
    reply = await site.ask("POST", "/prompt", {"prompt": GOOD, "number": 7, "client_id": "me", "extra_data": {"a": 1}})
    assert reply.status == 200, reply
    name = reply.json()["prompt_id"]
    await site.idle()
    for path in ("/history", "/queue", "/prompt", "/resolute/fleet"):
        assert (await site.ask("GET", path)).status == 200, path
    entry = (await site.ask("GET", f"/history/{name}")).json()[name]
    assert entry["prompt"] == [7.0, name, GOOD, {"a": 1, "client_id": "me"}, ["draw"]]
    assert entry["status"] == {"status_str": "success"}
    file = entry["outputs"]["draw"]["images"][0]
    query = f"filename={file['filename']}&subfolder={file['subfolder']}&type={file['type']}"
    shown = await site.ask("GET", "/view", query=query)
    assert shown.body == picture(GOOD)
    assert shown.headers["x-content-type-options"] == "nosniff"


def fetched(site: Site) -> list[str]:
    """The paths that a request made a replica fetch, without that of each start."""
    return [each for each in site.replica.fetched if each != "/features"]


def text(**fields: Any) -> bytes:
    return json.dumps({"prompt": GOOD, **fields}).encode()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"prompt": {"draw": {"class_type": "Draw"}}, "number": 1e999}', "inf is too large a number"),
        (b'{"prompt": {"draw": {"class_type": "Draw", "inputs": {"unused": NaN}}}}', "contains NaN"),
        (b'{"prompt": {}, "x": {"y": [-Infinity]}}', "contains -Infinity"),
        (text(number=10**30), "too large a number"),
        (text(number="1"), '"number" must be a number'),
        (text(number=True), '"number" must be a number'),
        (text(extra_data=[1]), '"extra_data" must be an object, not [1].'),
        (text(extra_data="x"), '"extra_data" must be an object'),
        (text(client_id=5), '"client_id" must be a text'),
        (text(client_id="x" * 1001), '"client_id" has 1001 characters'),
        (text(front="yes"), '"front" must be true or false'),
        (text(partial_execution_targets=5), '"partial_execution_targets" must be a list of texts'),
        (text(partial_execution_targets=[5]), '"partial_execution_targets" must be a list of texts'),
        (b'{"prompt": {"1": 5}}', '"prompt" must be a workflow in API form'),
        (b'{"prompt": {"1": {"class_type": []}}}', '"class_type" must be a text'),
        (b'{"prompt": {"1": {"inputs": []}}}', '"inputs" must be an object'),
        (b'{"prompt": [1]}', "No prompt"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"prompt": ' + b'{"a":' * 80 + b"1" + b"}" * 81, "64 levels"),
    ],
)
def test_a_wrong_field_of_a_prompt_is_refused_with_a_sentence(tmp_path: Path, body: bytes, said: str) -> None:
    reply, site = asked(tmp_path, "POST", "/prompt", body)
    assert reply.status == 400
    assert said in reply.json()["error"]["message"]
    assert len(site.replica.bodies) == 1, "a replica saw the wrong one too"


@pytest.mark.parametrize(
    ("body", "kind"),
    [(b"{}", "no_prompt"), *((each, "invalid_json") for each in (b"{", b"[]", b"\xff")),
     *((text(prompt_id=each), "invalid_prompt_id") for each in ("x", 1, "A" * 36))],
)  # fmt: skip
def test_what_is_no_prompt_is_refused_as_comfyui_does(tmp_path: Path, body: bytes, kind: str) -> None:
    reply, _ = asked(tmp_path, "POST", "/prompt", body)
    answer = reply.json()
    assert (reply.status, answer["error"]["type"]) == (400, kind)
    assert kind != "no_prompt" or answer["node_errors"] == {}


def test_an_unknown_id_has_no_history(tmp_path: Path) -> None:
    assert asked(tmp_path, "GET", f"/history/{ID}")[0].json() == {}


@pytest.mark.parametrize(
    "name", ["number", "extra_data", "client_id", "prompt_id", "front", "partial_execution_targets"]
)
def test_a_null_is_a_missing_field(tmp_path: Path, name: str) -> None:
    reply, site = asked(tmp_path, "POST", "/prompt", text(**{name: None}))
    assert reply.status == 200
    assert site.replica.bodies[0].get(name, "missing") is not None


@pytest.mark.parametrize("odd", ["\ud800", "\0", "\uffff", "ü", "x" * 900])
def test_any_text_is_given_back(tmp_path: Path, odd: str) -> None:
    """A half of a surrogate pair is JSON, and no UTF-8."""
    prompt = {"draw": {"class_type": "Draw", "inputs": {"text": odd}}}
    body = json.dumps({"prompt": prompt, "client_id": odd, "extra_data": {odd: odd}}).encode()
    reply, site = asked(tmp_path, "POST", "/prompt", body)
    assert reply.status == 200
    (entry,) = site.ingress._records.history(reply.json()["prompt_id"]).values()
    assert (entry["prompt"][2], entry["prompt"][3]) == (prompt, {odd: odd, "client_id": odd})


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/queue", {"delete": 5}, "delete"),
        ("/queue", {"delete": [{}]}, "delete"),
        ("/queue", {"delete": "x"}, "delete"),
        ("/queue", {"clear": [1]}, "clear"),
        ("/history", {"delete": [{}]}, "delete"),
        ("/history", {"delete": 5}, "delete"),
        ("/history", {"clear": "no"}, "clear"),
        ("/interrupt", {"prompt_id": 5}, "prompt_id"),
        ("/interrupt", {"prompt_id": []}, "prompt_id"),
    ],
)
def test_a_wrong_field_of_another_route_is_refused(tmp_path: Path, path: str, body: Any, named: str) -> None:
    reply, _ = asked(tmp_path, "POST", path, body)
    assert (reply.status, reply.json()["error"]["type"]) == (400, "invalid_field")
    assert reply.json()["error"]["message"].startswith(f'"{named}" must be ')


@pytest.mark.parametrize("body", [{"delete": ["\ud800", "x", ID]}, {"delete": None, "clear": None}, {}, b""])
@pytest.mark.parametrize("path", ["/queue", "/history"])
def test_unknown_ids_change_nothing(tmp_path: Path, path: str, body: Any) -> None:
    assert asked(tmp_path, "POST", path, body)[0].status == 200


@pytest.mark.parametrize("wrong", ["x", "1e9", "9" * 5000, "", "%00"])
def test_a_count_that_is_none_is_refused(tmp_path: Path, wrong: str) -> None:
    reply, _ = asked(tmp_path, "GET", "/history", query=f"max_items={wrong}")
    assert (reply.status, reply.json()["error"]["type"]) == (400, "invalid_query")


@pytest.mark.parametrize("count", ["99999999999999999999", "-99999999999999999999", "0", "-1"])
def test_any_count_is_answered(tmp_path: Path, count: str) -> None:
    assert asked(tmp_path, "GET", "/history", query=f"max_items={count}")[0].status == 200


def test_a_nan_of_a_node_is_a_null(tmp_path: Path) -> None:
    async def go() -> Any:
        site = await Site(tmp_path).start()
        site.replica.meta = {"loss": [float("nan"), float("-inf"), 1.5]}
        await works(site)
        return (await site.ask("GET", "/history")).json()

    (entry,) = asyncio.run(go()).values()
    assert entry["meta"] == {"loss": [None, None, 1.5]}


class TestPaths:
    @pytest.mark.parametrize(
        "path",
        [
            "/models/..%2Finternal%2Flogs",
            "/models/../internal/logs",
            "/models/%2e%2e/internal/logs",
            "/models/..%252Finternal%252Flogs",
            "/object_info/%3Fx",
            "/models/a%00b",
            "/models/.",
            "/api/models/..%2Finternal%2Flogs",
        ],
    )
    def test_what_leads_elsewhere_is_refused_before_a_replica_sees_it(self, tmp_path: Path, path: str) -> None:
        reply, site = asked(tmp_path, "GET", path)
        assert (reply.status, reply.json()["error"]["type"]) == (400, "invalid_path")
        assert fetched(site) == []

    @pytest.mark.parametrize(
        "path",
        ["/models/a/b", "/models/checkpoints/", "/models//x", "/features/x", "/internal/logs", "/userdata"],
    )
    def test_what_is_no_whole_path_is_not_found(self, tmp_path: Path, path: str) -> None:
        reply, site = asked(tmp_path, "GET", path)
        assert (reply.status, fetched(site)) == (404, [])

    @pytest.mark.parametrize(
        ("path", "whole"),
        [
            ("/models", "/models"),
            ("/api/models/checkpoints.v1", "/models/checkpoints.v1"),
            ("/object_info/Show%20Text%7Cpys#1", "/object_info/Show%20Text%7Cpys%231"),
            ("/system_stats", "/system_stats"),
        ],
    )
    def test_a_list_comes_from_a_replica(self, tmp_path: Path, path: str, whole: str) -> None:
        reply, site = asked(tmp_path, "GET", path)
        assert (reply.status, fetched(site)) == (200, [whole])

    @pytest.mark.parametrize(
        "query",
        ["filename=a%00b", "filename=a&subfolder=%00", "filename=a&type=%00", f"filename={'x' * 300}", "filename=",
         f"filename=a&subfolder={'x' * 300}", "filename=..%2Fa", "filename=/etc/passwd", "filename=a&type=other"],
    )  # fmt: skip
    def test_a_file_name_that_cannot_be_one_is_refused(self, tmp_path: Path, query: str) -> None:
        reply, _ = asked(tmp_path, "GET", "/view", query=query)
        assert (reply.status, reply.json()["error"]["type"]) == (400, "invalid_filename")

    @pytest.mark.parametrize(
        ("name", "more"),
        [("a\0b", ""), ("x" * 300, ""), ("..", ""), ("a", "subfolder=file/x"), ("folder", "overwrite=true"),
         ("a", "subfolder=../../x"), ("a", "type=output")],
    )  # fmt: skip
    def test_an_upload_that_cannot_have_its_name_is_refused(self, tmp_path: Path, name: str, more: str) -> None:
        (tmp_path / "input" / "folder").mkdir(parents=True)
        (tmp_path / "input" / "file").write_text("")
        parts = [f'name="image"; filename="{name}"\r\n\r\nx']
        parts += [f'name="{field}"\r\n\r\n{value}' for field, _, value in [more.partition("=")] if field]
        form = "".join(f"--b\r\nContent-Disposition: form-data; {part}\r\n" for part in parts) + "--b--\r\n"

        async def go() -> Reply:
            site = await Site(tmp_path).start()
            return await site.ask(
                "POST", "/upload/image", form.encode(), Content_Type="multipart/form-data; boundary=b"
            )

        reply = asyncio.run(go())
        assert (reply.status, reply.json()["error"]["type"]) == (400, "invalid_upload")

    def test_temporary_files_of_an_earlier_start_are_gone(self, tmp_path: Path) -> None:
        for kind in ("temp", "output"):
            (tmp_path / "ingress" / kind / "r").mkdir(parents=True)
            (tmp_path / "ingress" / kind / "r" / "a.png").write_bytes(b"x")
        asyncio.run(Site(tmp_path).start())
        left = [each.parent.parent.name for each in (tmp_path / "ingress").rglob("a.png")]
        assert left == ["output"]
