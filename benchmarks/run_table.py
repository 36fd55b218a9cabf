"""The rows of `benchmarks.run` as a table."""

from __future__ import annotations

from typing import Any

from .rig import STOCK
from .workloads import CONTENDERS

Row = dict[str, Any]

_HEAD = (
    f"{'model':<22}{'free':>5} {'size':<10}{'b':>2} {'contender':<12}{'first':>8}{'steady':>8}{'gain':>6}{'ms':>9}"
    f"{'/floor':>7}{'error':>9}{'1 step':>9}{'GiB':>7}{'held':>7}  captures, replays, compiles; bypasses"
)


def table(rows: list[Row]) -> str:
    """A line for each contender of each row."""
    return "\n".join([_HEAD, *(line(row, name) for row in rows for name in CONTENDERS if name in row)])


def line(row: Row, contender: str) -> str:
    """The figures of a contender."""
    found, stock = row[contender], row.get(STOCK, {})
    free = "all" if row["free_gib"] is None else f"{row['free_gib']:g}"
    start = f"{row['model']:<22}{free:>5} {row['size']:<10}{row['batch']:>2} {contender:<12}"
    if "failed" in found:
        return f"{start}  failed: {found['failed']}"
    counted = found["counters"]
    numbers = (
        _number(found["first_s"], 8, ".2f"),
        _number(found["steady_s"], 8, ".2f"),
        _number(_ratio(stock.get("steady_s"), found["steady_s"]), 6, ".2f"),
        _number(found.get("ms"), 9, ".1f"),
        _number(_ratio(found.get("ms"), row["floor_ms"]), 7, ".2f"),
        _number(found.get("error"), 9, ".1e"),
        _number(found.get("error_one_step"), 9, ".1e"),
        _number(found.get("peak_gib"), 7, ".2f"),
        _number(found.get("after_unload_gib"), 7, ".2f"),
    )
    notes = ", ".join(str(counted[name]) for name in ("captures", "replays", "region_compiles"))
    codes = "".join(f"; {count}x {code}" for code, count in found["bypasses"].items())
    return f"{start}{''.join(numbers)}  {notes}{codes}"


def _ratio(value: float | None, by: float | None) -> float | None:
    return value / by if value and by else None


def _number(value: float | None, width: int, form: str) -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"
