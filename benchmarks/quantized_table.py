"""The rows of `benchmarks.quantized`, and as a table, with the aims that each misses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .families import OURS
from .family_models import family
from .rig import STOCK

Row = dict[str, Any]

LEAST_GAIN = 1.5  # the aim in fp8: so many times stock's speed
LARGEST_ERROR = 1.5  # times stock's own
MOST_MS = {("flux", "fp8-scaled", "1024x1024"): 50.0, ("flux", "fp8-fast", "1024x1024"): 50.0}
_HEAD = (
    f"{'family':<11}{'format':<13}{'size':<11}{'stock':>8}{'core':>8}{'ours':>8}{'floor':>8}{'gain':>6}{'stock':>10}"
    f"{'ours':>10}  replays, captures, compiles; formats\n{'':<35}{'ms':>8}{'ms':>8}{'ms':>8}{'ms':>8}{'':>6}"
    f"{'error':>10}{'error':>10}"
)


def size_of(row: Row) -> tuple[int, int]:
    width, height = row["size"].split("x")
    return int(width), int(height)


def rows_of(wanted: Sequence[str], sizes: int, is_small: bool, out: Path | None) -> list[Row]:
    """All rows that are asked for, as FAMILY:FORMAT, at so many sizes, with what an earlier run measured."""
    known: dict[Any, Row] = {}
    if out and out.is_file():
        before = json.loads(out.read_text("utf-8"))["rows"]
        known = {(row["family"], row["format"], row["size"]): row for row in before}
    empty = dict.fromkeys(("stock_ms", "core_ms", "resolute_ms", "floor_ms", "error_stock", "error_resolute"))
    rows = []
    for name, _, form in (row.partition(":") for row in wanted):
        for size in family(name, is_small).sizes[:sizes]:
            key = (name, form, f"{size[0]}x{size[1]}")
            row = known.pop(key, None) or dict(zip(("family", "format", "size"), key, strict=True)) | empty
            row.setdefault("details", {})
            rows.append(row)
    return [*rows, *known.values()]


def table(rows: list[Row]) -> str:
    """The rows that were begun."""
    return "\n".join([_HEAD, *[line(row) for row in rows if row["details"]]])


def line(row: Row) -> str:
    times = "".join(_cell(row[f"{key}_ms"], 8, ".1f") for key in (STOCK, "core", OURS, "floor"))
    errors = "".join(_cell(row[f"error_{key}"], 10, ".2e") for key in (STOCK, OURS))
    details = row["details"]
    ours = details.get(OURS, {})
    counted = ours.get("counters", {})
    notes = [", ".join(str(counted.get(each, "-")) for each in ("replays", "captures", "region_compiles"))]
    notes += row.get("formats", [])
    notes += [f"{count}x {code}" for code, count in ours.get("bypasses", {}).items()]
    if "first_s" in ours:
        notes.append(f"first +{ours['first_s']:.0f} s")
    lora = details.get("lora", {})
    if "captures" in lora:
        notes.append(
            f"LoRAs: {lora['captures']} captures, {lora['region_compiles']} compiles, {lora['replays']} replays"
        )
    notes += [f"{who}: {result['failed']}" for who, result in details.items() if "failed" in result]
    notes += [f"missed: {text}" for text in _missed(row)]
    gain = _cell(_gain(row), 6, ".2f")
    return f"{row['family']:<11}{row['format']:<13}{row['size']:<11}{times}{gain}{errors}  {'; '.join(notes)}"


def _gain(row: Row) -> float | None:
    return row["stock_ms"] / row["resolute_ms"] if row["stock_ms"] and row["resolute_ms"] else None


def _missed(row: Row) -> list[str]:
    least = LEAST_GAIN if row["format"].startswith("fp8") else 1.0
    missed = []
    gain = _gain(row)
    if gain is not None and gain < least:
        missed.append(f"{least} times stock")
    most = MOST_MS.get((row["family"], row["format"], row["size"]))
    if most is not None and row["resolute_ms"] is not None and row["resolute_ms"] > most:
        missed.append(f"{most:.0f} ms")
    if row["error_stock"] and row["error_resolute"] and row["error_resolute"] > LARGEST_ERROR * row["error_stock"]:
        missed.append(f"{LARGEST_ERROR} times stock's error")
    if row["core_ms"] and row["resolute_ms"] and row["resolute_ms"] > row["core_ms"]:
        missed.append("faster than core's node")
    if row["details"].get("lora", {}).get("captures"):
        missed.append("no capture for a LoRA")
    return missed


def _cell(value: float | None, width: int, form: str) -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"
