"""The models of `benchmarks.streamed`, its rows and its table."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import families
from .family_models import family
from .rig import STOCK

OURS = families.OURS
ALL = "all"
MAX_OVER_BOUND, LEAST_GAIN = 1.15, 1.25  # the aims: times max(resident step, bytes / bus), and times stock


class Model(NamedTuple):
    """name: in `family_models`. form: of its weights. free: GiB, falling."""

    name: str
    form: str
    free: tuple[int, ...]


MODELS = {
    "flux": Model("flux-full", "", (20, 16, 12, 8)),
    "qwen-image": Model("qwen-image-full", "fp8-scaled", (16, 12, 8)),
    "wan": Model("wan-14b-half", "", (12, 8)),
}
CELLS = [f"{name}:{free}" for name, model in MODELS.items() for free in model.free]


def rows_of(measured: dict[str, Any], gb: dict[str, float], bus_gb_per_s: float | None) -> list[dict[str, Any]]:
    """measured: by model, contender and cell."""
    rows = []
    for name, by_contender in measured.items():
        stock, ours = by_contender.get(STOCK, {}), by_contender.get(OURS, {})
        size, frames = family(MODELS[name].name).sizes[0], family(MODELS[name].name).frames
        for free in dict.fromkeys([*stock, *ours]):
            a, b = stock.get(free, {}), ours.get(free, {})
            row = {
                "model": name,
                "gb": gb.get(name),
                "free_gib": None if free == ALL else int(free),
                "size": "x".join(map(str, [*size, *([frames] if frames > 1 else [])])),
                "stock_s_per_step": a.get("s_per_step"),
                "resolute_s_per_step": b.get("s_per_step"),
                "stock_resident_s_per_step": stock.get(ALL, {}).get("s_per_step"),
                "resident_s_per_step": ours.get(ALL, {}).get("s_per_step"),
                "bytes_per_step_stock": a.get("bytes_per_step"),
                "bytes_per_step_resolute": b.get("bytes_per_step"),
                "bus_gb_per_s": bus_gb_per_s,
                "error": b.get("error"),
                "details": {STOCK: a, OURS: b},
            }
            rows.append(row)
    return rows


def bound(row: dict[str, Any]) -> float | None:
    """The least seconds of a step: the resident step, or the bytes over the bus."""
    if row["resident_s_per_step"] is None or row["bytes_per_step_resolute"] is None or row["bus_gb_per_s"] is None:
        return None
    return float(max(row["resident_s_per_step"], row["bytes_per_step_resolute"] / row["bus_gb_per_s"] / 1e9))


def _waits_for_the_bus(row: dict[str, Any]) -> bool:
    """Stock's bytes take longer than its computing."""
    resident, moved, bus = (row[key] for key in ("stock_resident_s_per_step", "bytes_per_step_stock", "bus_gb_per_s"))
    return bool(resident and moved and bus and moved / bus / 1e9 > resident)


def line(row: dict[str, Any]) -> str:
    def cell(value: float | None, width: int, form: str) -> str:
        return f"{'-' if value is None else format(value, form):>{width}}"

    stock, ours, least = row["stock_s_per_step"], row["resolute_s_per_step"], bound(row)
    gain = stock / ours if stock and ours else None
    over = ours / least if ours and least else None
    notes = []
    if over is not None and over > MAX_OVER_BOUND:
        notes.append(f"missed: {MAX_OVER_BOUND} times the bound")
    if gain is not None and gain < 1:
        notes.append("missed: slower than stock")
    elif gain is not None and gain < LEAST_GAIN and _waits_for_the_bus(row):
        notes.append(f"missed: {LEAST_GAIN} times stock")
    details = row["details"]
    for who in (STOCK, OURS):
        each = details[who]
        if "failed" in each:
            notes.append(f"{who} failed: {each['failed']}")
        if each.get("bytes_per_step") and each.get("s_per_step"):
            notes.append(f"{who} reached {each['bytes_per_step'] / each['s_per_step'] / 1e9:.1f} GB/s")
        if each.get("prologues") or each.get("regions_compiled"):
            notes.append(f"{each['prologues']} prologues, {each['regions_compiled']} regions compiled")
        if "host_s" in each:
            notes.append(f"{who} host {each['host_s']:.3f} first {each['first_step_s']:.2f}")
    notes += [f"{count}x {code}" for code, count in details[OURS].get("bypasses", {}).items()]
    moved = [row[f"bytes_per_step_{who}"] for who in (STOCK, OURS)]
    gigabytes = "".join(cell(None if each is None else each / 1e9, 8, ".2f") for each in moved)
    return (
        f"{row['model']:<11}{row['free_gib'] or ALL!s:>5}{cell(stock, 9, '.3f')}{cell(ours, 9, '.3f')}"
        f"{cell(row['resident_s_per_step'], 9, '.3f')}{cell(least, 9, '.3f')}{cell(gain, 7, '.2f')}"
        f"{cell(over, 7, '.2f')}{gigabytes}{cell(row['error'], 9, '.1e')}  {'; '.join(notes)}"
    )


def compiled_line(name: str, free: str, found: dict[str, Any]) -> str:
    """The line of a server that only compiled."""
    if "failed" in found:
        return f"{name:<11}{free:>5} compiling failed: {found['failed']}"
    return (
        f"{name:<11}{free:>5} {found['regions']} regions compiled, waited {found['waited_s']} of {found['prompt_s']} s"
    )


HEAD = (
    f"{'model':<11}{'free':>5}{'stock':>9}{'ours':>9}{'resident':>9}{'bound':>9}{'gain':>7}{'/bound':>7}{'stock':>8}"
    f"{'ours':>8}{'error':>9}\n{'':<11}{'GiB':>5}{'s':>9}{'s':>9}{'s':>9}{'s':>9}{'':>7}{'':>7}{'GB':>8}{'GB':>8}"
)
