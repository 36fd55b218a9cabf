"""The ingress keeps this over a restart: prompt ids, prompts that are not over, and the history."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SetupError

logger = logging.getLogger("ray.serve")

_TABLES = (
    "prompts (id TEXT PRIMARY KEY, number REAL, body TEXT, entry TEXT, shown INT)",
    "used (key TEXT PRIMARY KEY, count INT, workflow TEXT)",
)
_COUNTED = 2**53  # above, one more is the same number
_USED = 500  # workflows whose uses are counted: the most used ones, then the latest
_KEPT = 10_000  # prompts that are over, as in ComfyUI's history


@dataclass(frozen=True, slots=True)
class Record:
    """A prompt that was taken in. body: as posted."""

    prompt_id: str
    number: float
    body: dict[str, Any]


class Records:
    """One small SQLite file, which only the ingress opens. Every change is on disk when its method returns."""

    def __init__(self, path: Path) -> None:
        """Raises SetupError if the file cannot be written."""
        self._unsaved: dict[str, Any] = {}  # entries that the disk had no space for
        self._skipped: set[str] = set()  # records that cannot be read and are in the log
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._base = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._base.text_factory = lambda content: content.decode("utf-8", "replace")
            for table in _TABLES:
                self._base.execute(f"CREATE TABLE IF NOT EXISTS {table}")
            # A file of a disk that became read-only opens; only a write fails.
            self._base.execute("DELETE FROM used WHERE count < 0")
        except (OSError, sqlite3.Error) as error:
            raise SetupError(f"The fleet cannot keep its records in {path}: {error}.") from None

    def add(self, record: Record) -> bool:
        """Take in a prompt. False if its id was used before. Raises sqlite3.Error on a full disk."""
        try:
            self._base.execute(
                "INSERT INTO prompts VALUES (?, ?, ?, NULL, 1)",
                (record.prompt_id, record.number, json.dumps(record.body)),
            )
        except sqlite3.IntegrityError:
            return False
        return True

    def finish(self, prompt_id: str, entry: Mapping[str, Any]) -> bool:
        """Keep a prompt's only result. False if it has one already.

        On a full disk the result is kept in memory; the next ingress would run the prompt again.
        """
        if prompt_id in self._unsaved:
            return False
        try:
            done = self._base.execute(
                "UPDATE prompts SET entry = ? WHERE id = ? AND entry IS NULL", (json.dumps(entry), prompt_id)
            )
            self._base.execute(
                "DELETE FROM prompts WHERE entry IS NOT NULL AND rowid <= (SELECT MAX(rowid) FROM prompts) - ?",
                (_KEPT,),
            )
        except sqlite3.Error as error:
            logger.error("the result of prompt %s is in memory only: %s", prompt_id, error)
            self._unsaved[prompt_id] = dict(entry)
            return True
        return done.rowcount == 1

    def drop(self, prompt_id: str) -> None:
        """Forget a prompt that was refused, so that its id can be used again."""
        self._base.execute("DELETE FROM prompts WHERE id = ? AND entry IS NULL", (prompt_id,))

    def hide(self, prompt_id: str | None = None) -> None:
        """Take one prompt, or all, from the history. Their ids stay used."""
        for name in list(self._unsaved) if prompt_id is None else [prompt_id]:
            self._unsaved.pop(name, None)
        self._base.execute("UPDATE prompts SET shown = 0 WHERE entry IS NOT NULL AND id = IFNULL(?, id)", (prompt_id,))

    def history(self, prompt_id: str | None = None, count: int = _KEPT) -> dict[str, Any]:
        """Entries by prompt id, the latest `count` of them in the order in which they came."""
        if prompt_id is not None:
            rows = self._base.execute("SELECT id, entry FROM prompts WHERE id = ? AND shown", (prompt_id,))
        else:
            rows = self._base.execute(
                "SELECT id, entry FROM (SELECT rowid AS n, id, entry FROM prompts WHERE entry IS NOT NULL AND shown "
                "ORDER BY n DESC LIMIT ?) ORDER BY n",
                (count,),
            )
        found = {name: self._object(entry, f"the result of prompt {name}") for name, entry in rows if entry is not None}
        saved = {name: entry for name, entry in found.items() if entry is not None}
        unsaved = {name: each for name, each in self._unsaved.items() if prompt_id in (None, name)}
        return {**saved, **unsaved}

    def unfinished(self) -> list[Record]:
        """Prompts without a result, in the order in which they came. One that cannot be read is removed: it can never
        run, and would be in the log at each start.
        """
        rows = self._base.execute("SELECT id, number, body FROM prompts WHERE entry IS NULL ORDER BY rowid")
        found = [
            (name, number, self._object(body, f"prompt {name}", "prompt")) for name, number, body in rows.fetchall()
        ]
        for name in [name for name, _, body in found if body is None]:
            with contextlib.suppress(sqlite3.Error):  # a full disk
                self.drop(name)
        return [Record(name, _finite(number), body) for name, number, body in found if body is not None]

    def next_number(self) -> int:
        """One more than the largest number so far, without those that only a client can have chosen."""
        found = self._base.execute("SELECT MAX(number) FROM prompts WHERE ABS(number) < ?", (_COUNTED,))
        (largest,) = found.fetchone()
        return 0 if largest is None else int(largest) + 1

    def used(self, key: str, workflow: Mapping[str, Any]) -> None:
        """Count a use of a workflow. The least used ones are forgotten."""
        self._base.execute(
            "INSERT INTO used VALUES (?, 1, ?) "
            "ON CONFLICT (key) DO UPDATE SET count = count + 1, workflow = excluded.workflow",
            (key, json.dumps(workflow)),
        )
        self._base.execute(
            "DELETE FROM used WHERE key NOT IN (SELECT key FROM used ORDER BY count DESC, rowid DESC LIMIT ?)", (_USED,)
        )

    def most_used(self, count: int) -> list[tuple[int, dict[str, Any]]]:
        """(uses, workflow) of the shapes that were used most."""
        rows = self._base.execute("SELECT count, workflow FROM used ORDER BY count DESC LIMIT ?", (count,))
        found = [(uses, self._object(workflow, "a much used workflow")) for uses, workflow in rows]
        return [(uses, workflow) for uses, workflow in found if workflow is not None]

    def share(self, key: str) -> float:
        """The share that these shapes have of all uses: 0 to 1."""
        (total,) = self._base.execute("SELECT SUM(count) FROM used").fetchone()
        row = self._base.execute("SELECT count FROM used WHERE key = ?", (key,)).fetchone()
        return row[0] / total if row and total else 0.0

    def _object(self, text: Any, what: str, *objects: str) -> dict[str, Any] | None:
        """A kept JSON object with these objects in it. None for what is none, which the log then says once."""
        try:
            found = json.loads(text)
        except (TypeError, ValueError, RecursionError):
            found = None
        if isinstance(found, dict) and all(isinstance(found.get(name), dict) for name in objects):
            return found
        if what not in self._skipped:
            self._skipped.add(what)
            logger.warning("%s cannot be read from the fleet's records and is skipped", what)
        return None


def is_used_workflow(value: Any) -> bool:
    """A workflow that a new replica can warm up, with what it needs; a damaged file may hold anything."""
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), dict):
        return False
    need = value.get("need")
    shapes = need.get("shapes") if isinstance(need, dict) else None
    return isinstance(shapes, list) and all(isinstance(each, str) for each in shapes)


def _finite(number: Any) -> float:
    return float(number) if isinstance(number, (int, float)) and math.isfinite(number) else 0.0
