"""The rows and the table of `small_cards`. Plain data."""

from __future__ import annotations

import math
from typing import Any

import numpy

STOCK, OURS, CORE = "stock", "inductor", "TorchCompileModel"
NAMES = {STOCK: "stock", OURS: "resolute", CORE: "core"}  # of the contenders in the rows

Size = tuple[int, int, int]  # width, height, batch
Latents = dict[tuple[str, int, int], Any]  # by contender, place of the size, and number of the prompt


def rows_of(
    kind: str, free: float | None, sizes: list[Size], results: dict[str, dict[str, Any]], latents: Latents
) -> list[dict[str, Any]]:
    """One row for each size, with the seconds and the peak of each contender. Moves what `results` has of latents into
    `latents`: the errors come with the results of stock, which are the last.
    """
    for contender, result in results.items():
        for place, found in enumerate(result["sizes"]):
            for number, each in enumerate(found.get("runs", [])):
                if "latents" in each:
                    latents[contender, place, number] = each.pop("latents")
    rows = []
    for place, (width, height, batch) in enumerate(sizes):
        row: dict[str, Any] = {"model": kind, "free_gib": free, "size": f"{width}x{height}", "batch": batch}
        for contender, result in results.items():
            name, found = NAMES[contender], dict(enumerate(result["sizes"])).get(place, {})
            runs = found.get("runs", [])
            row[name] = found.get("seconds")
            row[f"{name}_first"] = runs[0]["seconds"] if runs and not place else None
            row[f"{name}_peak_gib"] = found.get("peak_gib")
            for number, each in enumerate(runs):
                key, reference = (contender, place, number), latents.get((STOCK, place, number))
                if contender != STOCK and reference is not None and key in latents:
                    each["error"] = _error(latents[key], reference)
            row[f"{name}_detail"] = found
        row["ratio"] = row["stock"] / row["resolute"] if row.get("stock") and row.get("resolute") else None
        rows.append(row)
    return rows


def _error(ours: Any, stock: Any) -> float | None:
    error = float(numpy.linalg.norm(ours - stock) / numpy.linalg.norm(stock))
    return error if math.isfinite(error) else None


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'model':<6}{'free':>5} {'size':<10}{'b':>2}{'stock':>8}{'resolute':>9}{'ratio':>7}"
        f"{'first':>8}{'ours':>8}{'peak':>7}{'ours':>7}  steady prompts: captures, bypasses, capture MiB; error"
    ]
    for row in rows:
        runs = row.get("resolute_detail", {}).get("runs", [])
        steady = [(each["captures"], each["bypasses"] or "-", each["capture_mib"]) for each in runs[1:]]
        free = "all" if row["free_gib"] is None else f"{row['free_gib']:g}"
        shown = [f"{row.get(name):.2f}" if row.get(name) is not None else "-" for name in _SHOWN]
        failed = [row.get(f"{name}_detail", {}).get("failed", "") for name in NAMES.values()]
        errors = [f"{each.get('error') or 0:.0e}" for each in runs]
        lines.append(
            f"{row['model']:<6}{free:>5} {row['size']:<10}{row['batch']:>2}{shown[0]:>8}{shown[1]:>9}{shown[2]:>7}"
            f"{shown[3]:>8}{shown[4]:>8}{shown[5]:>7}{shown[6]:>7}  {steady} "
            f"{' '.join(errors)} {' '.join(filter(None, failed))}"
        )
    return "\n".join(lines)


_SHOWN = ("stock", "resolute", "ratio", "stock_first", "resolute_first", "stock_peak_gib", "resolute_peak_gib")
