"""Draws README's strip and the charts of docs/measured.md into docs/charts: `python -m benchmarks.charts`.

All numbers come from the raw files named here; a test redraws the charts and compares. A new run replaces its file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from statistics import median
from typing import Any, NamedTuple

from scripts.places import ROOT

from .rig import OURS, STOCK
from .smoke_checks import figures
from .smoke_rows import QUEUE, RESTART, START

RESULTS, FOLDER = ROOT / "benchmarks" / "results", ROOT / "docs" / "charts"
SMOKE, PROMPTS = "2026-11-29-h200-tiers.json", "2026-11-28-h200-queue-sdxl.json"
STEPS = ("2026-11-23-h200-families-by-shape.json", "2026-11-24-h200-families-video.json")
CARDS = (  # the last file wins for the same model and memory
    "2026-11-27-h100-small-cards-sdxl.json", "2026-11-28-h100-small-cards-sdxl-6-and-12.json",
    "2026-11-27-h100-small-cards-flux.json", "2026-11-28-h100-small-cards-flux-fp8.json",
    "2026-11-28-h100-small-cards-flux-fp8-16.json",
)  # fmt: skip
GREY, CYAN, PALE, INK = "#9aa5ab", "#16a394", "#8fd6cd", "#16232b"


class Headline(NamedTuple):
    """Seconds of whole SDXL prompts at 1024x1024 in SMOKE. stock: the median without the first. compiled, error: the
    last one after a restart. firsts, seconds: (stock, ours), first and second prompt with an empty store.
    """

    stock: float
    compiled: float
    firsts: tuple[float, float]
    seconds: tuple[float, float]
    error: float

    def text(self) -> str:
        seconds = f"stock {self.stock:.2f} s | Resolute {self.compiled:.2f} s"
        return f"SDXL 1024x1024: {seconds}, {self.stock / self.compiled:.1f}x, same picture"


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text("utf-8"))


def headline() -> Headline:
    rows = {row["kind"]: row for row in read(SMOKE)["rows"] if row["model"] == "SDXL"}
    stock, ours = ([each["seconds"] for each in rows[QUEUE][by]["prompts"]] for by in (STOCK, OURS))
    same = [each for each, size in zip(stock, rows[QUEUE]["sizes"], strict=True) if size == [1024, 1024, 1]]
    compiled, error = rows[RESTART][OURS]["prompts"][-1]["seconds"], rows[RESTART]["errors"]["20"]
    return Headline(median(same[1:]), compiled, (stock[0], ours[0]), (stock[1], ours[1]), error)


def models() -> Iterator[tuple[str, float, float, str]]:
    """(model and size, stock's, Resolute's, unit)"""
    yield "SDXL 1024x1024, 20 steps", headline().stock, headline().compiled, "s"
    for row in read(SMOKE)["rows"]:
        stock, ours = figures(row, STOCK).ms, figures(row, OURS).ms
        if row["kind"] == START and stock and ours:
            yield row["row"], stock, ours, "ms a step"
    for row in (row for name in STEPS for row in read(name)["rows"]):
        if row["resolute_ms"] and row["family"] != "flux":
            yield f"{row['family']} {row['size']}", row["stock_ms"], row["resolute_ms"], "ms a step"


def by_memory() -> dict[tuple[str, float], float]:
    """The speedup over stock at 1024x1024, by model and free GiB."""
    rows = [row for name in CARDS for row in read(name)["rows"] if row["size"] == "1024x1024"]
    names = {"sdxl": "SDXL", "flux": "Flux", "flux:fp8-scaled": "Flux fp8"}
    return {(names[each["model"]], each["free_gib"]): each[STOCK]["steady_s"] / each[OURS]["steady_s"] for each in rows}


def svg(height: int, title: str, parts: Iterator[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" font-family="Arial" font-size="13">'
    back = f'<rect width="720" height="{height}" rx="8" fill="#fff"/>{words(16, 26, title, weight="bold")}'
    return "\n".join([head, f"<title>{escape(title)}</title>", back, *parts, "</svg>\n"])


def words(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    look = f'text-anchor="{anchor}" font-weight="{weight}" fill="{INK}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {look}>{escape(text)}</text>'


def bar(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"/>'


def strip() -> Iterator[str]:
    whole = headline().stock
    for y, name, seconds, fill in ((42, "stock", whole, GREY), (76, "Resolute", headline().compiled, CYAN)):
        yield bar(100, y, 480 * seconds / whole, 26, fill) + words(16, y + 18, name)
        yield words(108 + 480 * seconds / whole, y + 18, f"{seconds:.2f} s", weight="bold")


def model_bars() -> Iterator[str]:
    for y, (name, stock, ours, unit) in zip(range(44, 2000, 30), models(), strict=False):
        label = f"{stock:.{2 * (unit == 's')}f} -> {ours:.{2 * (unit == 's')}f} {unit}, {stock / ours:.1f}x"
        yield bar(210, y, 300, 9, GREY) + bar(210, y + 10, 300 * ours / stock, 9, CYAN)
        yield words(16, y + 14, name) + words(518, y + 14, label)


def prompt_bars() -> Iterator[str]:
    """Cut off above 6 s: only the first prompts, which load the model, take longer, and their seconds are labelled."""
    of = {row["contender"]: row["prompts"] for row in read(PROMPTS)["rows"] if row["case"] == "queue"}
    for seconds in (0, 2, 4, 6):
        yield bar(40, 240 - 30 * seconds, 664, 0.5, GREY) + words(32, 244 - 30 * seconds, f"{seconds}", "end")
    for n, pair in enumerate(zip(of[STOCK], of[OURS], strict=True)):
        for x, each in zip((48 + 27 * n, 58 + 27 * n), pair, strict=True):
            height = 30 * min(each["seconds"], 6.6)
            yield bar(x, 240 - height, 9, height, {None: GREY, 2: CYAN}.get(each["tier"], PALE))
    yield words(76, 54, f"{of[STOCK][0]['seconds']:.1f}, {of[OURS][0]['seconds']:.1f}")
    for x, fill, name in ((330, GREY, "stock"), (400, PALE, "not all compiled"), (530, CYAN, "compiled")):
        yield bar(x, 44, 10, 10, fill) + words(x + 15, 54, name)
    yield words(372, 262, "number of the prompt, 1 to 24", "middle")


def memory_bars() -> Iterator[str]:
    for y, ((model, free), ratio) in zip(range(42, 2000, 22), sorted(by_memory().items()), strict=False):
        yield bar(170, y, 120 * ratio, 15, CYAN) + words(16, y + 12, f"{model}, {free:.0f} GiB free")
        yield words(178 + 120 * ratio, y + 12, f"{ratio:.1f}x")
    yield bar(290, 40, 1, 22 * len(by_memory()), INK) + words(296, 54 + 22 * len(by_memory()), "stock")


def charts() -> dict[str, str]:
    return {
        "strip.svg": svg(116, headline().text(), strip()),
        "models.svg": svg(54 + 30 * len([*models()]), "Stock and Resolute, compiled, on an H200", model_bars()),
        "prompts.svg": svg(272, "SDXL, 24 prompts back to back, nothing on disk: seconds", prompt_bars()),
        "memory.svg": svg(260, "1024x1024 with less free memory on an H100: times stock", memory_bars()),
    }


if __name__ == "__main__":
    for chart, text in charts().items():
        (FOLDER / chart).write_text(text, "utf-8")
    print(headline())
