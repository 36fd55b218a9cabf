"""Draws the results of the block cache's comparison as SVG: speed against error, one panel per number of steps.

python -m benchmarks.block_cache.plot benchmarks/results/NAME-block-cache.json docs/block-cache.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ..deepcache_plot import GAP, HEIGHT, LEFT, TOP, WIDTH, Panel, marker, text

# What a line shows: the kind, the blocks of a fast pass, its colour and the shape of its points.
LINES = (
    ("fewer steps", None, "#707070", "cross"),
    ("EasyCache", None, "#b5482a", "square"),
    ("fixed", [2, 1], "#2f7f86", "square"),
    ("planned, changes", [2, 1], "#2f7f86", "dot"),
    ("planned, changes", [0, 0], "#5b4a9e", "dot"),
)
SAME, LEAST_DB = 99.0, 28.0


def draw(result: dict[str, Any]) -> str:
    """The whole plot as SVG text. The error is the RMS of the pixels, as a share of their range."""
    panels = []
    for number, steps in enumerate(sorted({row["steps"] for row in result["rows"]})):
        rows = [row for row in result["rows"] if row["steps"] == steps]
        (full,) = (row for row in rows if row["kind"] == "full")
        lines = [(_points(rows, full, kind, blocks), colour, shape) for kind, blocks, colour, shape in LINES]
        title = f"{steps} steps"
        panel = Panel(LEFT + number * (WIDTH + GAP), title, [point for points, _, _ in lines for point in points])
        for points, colour, shape in lines:
            panel.series(points, colour, shape, dashed=shape != "dot")
        panels.append(panel)
    height, y = TOP + HEIGHT + 120, TOP + HEIGHT + 62
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + len(panels) * (WIDTH + GAP)} {height}" '
        'font-family="sans-serif">',
        f'<rect width="{LEFT + len(panels) * (WIDTH + GAP)}" height="{height}" fill="#ffffff"/>',
        text(LEFT, 26, "A transformer's steps: error of the pictures against speed", "#202020", 17),
        *(part for panel in panels for part in panel.parts),
    ]
    for number, (kind, blocks, colour, shape) in enumerate(LINES):
        name = kind.partition(",")[0] + _fast(blocks)
        x = LEFT + 10 + number * 190
        parts += [marker(x, y, colour, shape), text(x + 10, y + 4, name, "#202020", 11)]
    pictures = len(result["seeds"]) * result["captions"]
    caption = (
        f"Each point: {pictures} pictures of a transformer with {result['depth']} blocks, trained for this, against "
        f"their full runs; {result['gpu']}, {result['date'][:10]}. Time: passes times the time of a pass."
    )
    return "\n".join([*parts, text(LEFT, y + 30, caption, "#404040", 11), "</svg>"]) + "\n"


def _fast(blocks: list[int] | None) -> str:
    if blocks is None:
        return ""
    return f", {sum(blocks)} blocks in a fast pass" if sum(blocks) else ", whole calls skipped"


def _points(
    rows: list[dict[str, Any]], full: dict[str, Any], kind: str, blocks: list[int] | None
) -> list[tuple[float, float, str]]:
    points = []
    for row in rows:
        psnr = sum(row["psnr"]) / len(row["psnr"])
        if row["kind"] == kind and blocks in (None, row["blocks"]) and LEAST_DB < psnr < SAME:
            speedup = sum(full["model_seconds"]) / sum(row["model_seconds"])
            points.append((speedup, 10 ** (-psnr / 20), ""))
    return sorted(points)


def main() -> int:
    source, out = map(Path, sys.argv[1:])
    out.write_text(draw(json.loads(source.read_text("utf-8"))), "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
