"""Records of the fleet that are damaged or that nobody can read: a start never fails for one."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from scripts.serving import replica
from scripts.serving.config import from_plain

from .in_process import Site, alone
from .test_requests import GOOD, ID, works

__all__ = ["alone"]


@pytest.mark.parametrize(
    ("number", "body", "is_readable"),
    [
        (float("inf"), json.dumps({"prompt": GOOD}), True),
        (None, json.dumps({"prompt": GOOD}), True),  # NaN in SQLite
        (1, json.dumps({"prompt": GOOD, "extra_data": [1]}), True),
        (1, json.dumps({"prompt": GOOD, "extra_data": {}, "number": float("nan")}), True),
        (1, json.dumps({"prompt": {"1": 5}}), True),
        (1, json.dumps({"prompt": [1]}), False),
        (1, json.dumps({}), False),
        (1, "{", False),
        (1, "[]", False),
        (1, b"\xff\xfe", False),
        (1, None, False),
        (1, '{"prompt": ' + "[" * 5000 + "]" * 5000 + "}", False),
    ],
)
def test_a_prompt_that_was_not_over(tmp_path: Path, number: Any, body: Any, is_readable: bool) -> None:
    write(tmp_path, number, body, None)

    async def go() -> Site:
        site = await Site(tmp_path).start()
        await site.idle()
        await works(site)
        return site

    site = asyncio.run(go())
    entries = site.ingress._records.history(ID)
    assert list(entries) == [ID] * is_readable, "it has an end if it can be read"
    assert [each.prompt_id for each in site.ingress._records.unfinished()] == []


@pytest.mark.parametrize(
    ("entry", "is_shown"),
    [
        (json.dumps({"prompt": [float("inf"), ID, GOOD, {}, []]}), True),
        (json.dumps({"prompt": [1, ID, {"draw": {"inputs": {"x": float("nan")}}}, {}, []]}), True),
        (json.dumps({"text": "\ud800"}), True),
        ('{"deep": ' + "[" * 500 + "]" * 500 + "}", True),
        ('{"deep": ' + "[" * 50_000 + "]" * 50_000 + "}", False),
        ("{", False),
        ("[]", False),
        (b"\xff", False),
    ],
)
def test_a_result(tmp_path: Path, entry: Any, is_shown: bool) -> None:
    write(tmp_path, 1, "{}", entry)

    async def go() -> Any:
        site = await Site(tmp_path).start()
        await works(site)
        return (await site.ask("GET", "/history")).json()

    found = asyncio.run(go())
    assert (ID in found, len(found)) == (is_shown, 1 + is_shown)


@pytest.mark.parametrize("workflow", ["{", "[]", "{}", '{"prompt": {}, "need": {"shapes": [1]}}', b"\xff"])
def test_a_used_workflow(tmp_path: Path, workflow: Any) -> None:
    write(tmp_path, 1, "{}", "{}")
    base = sqlite3.connect(tmp_path / "ingress" / "prompts.sqlite", isolation_level=None)
    base.execute("INSERT INTO used VALUES ('k', 5, ?)", (workflow,))
    base.close()
    picture_of_a_model = {
        "load": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "a"}},
        "latent": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        "draw": {"class_type": "KSampler", "inputs": {"model": ["load", 0], "latent_image": ["latent", 0]}},
    }

    async def go() -> Site:
        site = await Site(tmp_path).start()
        need = site.ingress._prompts.start
        record = type("R", (), {"prompt_id": ID, "number": 1.0, "body": {"prompt": picture_of_a_model}})()
        prompt = need(record)
        site.ingress._prompts._note_use(prompt)
        await site.idle()
        return site

    asyncio.run(go())
    written = json.loads((tmp_path / replica.USED).read_text("utf-8"))
    assert [each["prompt"] for each in written] == [picture_of_a_model]


@pytest.mark.parametrize("content", ["{", "5", "[5]", '[{"prompt": {}}]', '[{"need": {"shapes": []}}]'])
def test_a_file_of_used_workflows(tmp_path: Path, content: str) -> None:
    """A replica that raises here is replaced, and the next one raises too."""
    (tmp_path / "main.py").write_text("")
    good = {"prompt": GOOD, "need": {"shapes": ["m 64x64x1"]}}
    (tmp_path / replica.USED).write_text(content, "utf-8")
    config = from_plain({"comfyui": str(tmp_path), "folder": str(tmp_path)})
    assert replica._most_used(config) == []
    (tmp_path / replica.USED).write_text(json.dumps([5, good]), "utf-8")
    assert replica._most_used(config) == [good]


def write(folder: Path, number: Any, body: Any, entry: Any) -> None:
    async def go() -> None:
        await Site(folder).start()  # makes the tables

    asyncio.run(go())
    base = sqlite3.connect(folder / "ingress" / "prompts.sqlite", isolation_level=None)
    # Stored as text: SQLite also keeps bytes that are no UTF-8.
    base.execute("INSERT INTO prompts VALUES (?, ?, CAST(? AS TEXT), CAST(? AS TEXT), 1)", (ID, number, body, entry))
    base.close()
