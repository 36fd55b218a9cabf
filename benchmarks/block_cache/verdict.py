"""The lead of planned schedules over fewer steps and EasyCache, at equal cost."""

from __future__ import annotations

import statistics
from typing import Any

SPEEDUPS = (1.3, 1.5, 1.75, 2.0, 2.5, 3.0)
MARGIN_DB, ERRORS = 2.0, 2.0
RIVALS = ("fewer steps", "EasyCache")


def at_cost(rows: list[dict[str, Any]], cost: float, clock: str, seed: int) -> float | None:
    """The PSNR that a way reaches for one seed at this cost: between its two nearest settings, or None outside."""
    same = 99.0  # dB: a setting that skipped nothing has no place between others
    points = sorted((row[clock][seed], row["psnr"][seed]) for row in rows if row["psnr"][seed] < same)
    below = [point for point in points if point[0] <= cost]
    above = [point for point in points if point[0] > cost]
    if not below:
        return None
    best_below = max(psnr for _, psnr in below)  # what costs less and is better is free to take
    if not above:
        return best_below
    (x0, y0), (x1, y1) = below[-1], above[0]
    return max(best_below, y0 + (y1 - y0) * (cost - x0) / max(x1 - x0, 1e-12))


def verdict(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each number of steps, clock and speedup, each way's PSNR, and each other way's lead over the best rival."""
    found = []
    for steps in dict.fromkeys(row["steps"] for row in rows):
        of = [row for row in rows if row["steps"] == steps]
        full = next(row for row in of if row["kind"] == "full")
        ways: dict[str, list[dict[str, Any]]] = {}
        for row in of:
            if row["kind"] != "full":
                name = row["kind"] if row["kind"] in RIVALS else f"{row['kind']} {row['blocks'][0]}+{row['blocks'][1]}"
                ways.setdefault(name, []).append(row)
        for clock in ("seconds", "model_seconds"):
            for speedup in SPEEDUPS:
                costs = [value / speedup for value in full[clock]]
                reached = {
                    name: [at_cost(own, cost, clock, seed) for seed, cost in enumerate(costs)]
                    for name, own in ways.items()
                }
                found += [
                    {"steps": steps, "clock": clock, "speedup": speedup, "way": name, **lead(values, reached)}
                    for name, values in reached.items()
                ]
    return found


def lead(values: list[float | None], reached: dict[str, list[float | None]]) -> dict[str, Any]:
    """The mean PSNR over the seeds; the lead over the stronger rival with its standard error; whether it suffices."""
    if any(value is None for value in values):
        return {"psnr": None, "lead": None, "error": None, "wins": False}
    mean = statistics.mean(value for value in values if value is not None)
    rivals = [reached[name] for name in RIVALS if name in reached and None not in reached[name]]
    if not rivals:
        return {"psnr": mean, "lead": None, "error": None, "wins": False}
    strongest = max(rivals, key=lambda rival: statistics.mean(value for value in rival if value is not None))
    differences = [a - b for a, b in zip(values, strongest, strict=True) if a is not None and b is not None]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    gained = statistics.mean(differences)
    return {"psnr": mean, "lead": gained, "error": error, "wins": gained >= MARGIN_DB and gained > ERRORS * error}


def line(row: dict[str, Any]) -> str:
    """One row as text."""
    mean = statistics.mean
    return (
        f"{row['steps']:>3} {row['kind']:<17}{row['setting']!s:<8}{row['blocks']!s:<8}"
        f"full {mean(row['full']):5.1f} fast {row['fast']:>3} {mean(row['seconds']) * 1000:7.1f} ms "
        f"{mean(row['psnr']):6.2f} dB {mean(row['features']):.5f}"
    )


def table(found: list[dict[str, Any]], steps: int, clock: str = "model_seconds") -> list[str]:
    """A table of PSNR by way and speedup, for one number of steps."""
    own = [entry for entry in found if entry["steps"] == steps and entry["clock"] == clock]
    lines = [f"{steps} steps, {clock}".ljust(28) + "".join(f"{speedup:>15}" for speedup in SPEEDUPS)]
    for way in dict.fromkeys(entry["way"] for entry in own):
        cells = []
        for entry in (entry for entry in own if entry["way"] == way):
            if entry["psnr"] is None:
                cells.append("-".rjust(15))
            else:
                gained = "" if entry["lead"] is None else f" {entry['lead']:+.1f}~{entry['error']:.1f}"
                cells.append(f"{entry['psnr']:.1f}{gained}{'*' if entry['wins'] else ''}".rjust(15))
        lines.append(way.ljust(28) + "".join(cells))
    return lines
