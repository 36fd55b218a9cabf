"""Draws the results of `deepcache_quality` as SVG: speed against error, one panel per number of steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

WIDTH, HEIGHT, LEFT, TOP, GAP = 460, 380, 70, 70, 80
_DEPTH_COLOURS = {1: "#b5482a", 2: "#2f7f86", 3: "#5b4a9e"}
GREY = "#707070"
_TICKS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0]
Point = tuple[float, float, str]  # speedup, error, label


class Panel:
    """One diagram. x: speedup (linear); y: error of the latents (logarithmic)."""

    def __init__(self, left: float, title: str, points: Sequence[Point]) -> None:
        self.parts: list[str] = []
        self._left = left
        self._max_speedup = max(1.5, *(speedup for speedup, _, _ in points)) * 1.08
        errors = [error for _, error, _ in points if error > 0]
        self._low = max(tick for tick in _TICKS if tick <= max(min(errors), _TICKS[0]))
        self._high = min(tick for tick in _TICKS if tick >= min(max(errors), _TICKS[-1]))
        self._axes(title)

    def x(self, speedup: float) -> float:
        low = 0.5
        return self._left + WIDTH * (speedup - low) / (self._max_speedup - low)

    def y(self, error: float) -> float:
        share = math.log(max(error, self._low) / self._low) / math.log(self._high / self._low)
        return TOP + HEIGHT * (1 - share)

    def series(self, points: Sequence[Point], colour: str, shape: str, dashed: bool = False) -> None:
        """Add labelled points joined by a line."""
        path = " ".join(f"{self.x(a):.1f},{self.y(b):.1f}" for a, b, _ in points)
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-opacity="0.55"{dash}/>')
        for speedup, error, label in points:
            x, y = self.x(speedup), self.y(error)
            self.parts += [marker(x, y, colour, shape), text(x + 6, y - 5, label, colour, 10)]

    def _axes(self, title: str) -> None:
        right, bottom = self._left + WIDTH, TOP + HEIGHT
        self.parts.append(text(self._left, TOP - 12, title, "#202020", 14))
        for tick in (tick for tick in _TICKS if self._low <= tick <= self._high):
            y = self.y(tick)
            self.parts.append(f'<line x1="{self._left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#e4e4e4"/>')
            self.parts.append(text(self._left - 6, y + 4, f"{tick:g}", "#404040", 11, "end"))
        for half in range(1, int(self._max_speedup * 2) + 1):
            x = self.x(half / 2)
            self.parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#efefef"/>')
            self.parts.append(text(x, bottom + 16, f"{half / 2:g}", "#404040", 11, "middle"))
        self.parts.append(
            text((self._left + right) / 2, bottom + 36, "times faster (measured)", "#202020", 12, "middle")
        )


def draw(result: dict[str, Any]) -> str:
    """The whole plot as SVG text."""
    panels = [_panel(result, number, steps) for number, steps in enumerate(_steps(result))]
    width = LEFT + len(panels) * (WIDTH + GAP)
    height = TOP + HEIGHT + 120
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        text(LEFT, 26, "DeepCache: relative RMS error of the latents against speed", "#202020", 17),
        *(part for panel in panels for part in panel.parts),
        *_legend(TOP + HEIGHT + 62, result),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def marker(x: float, y: float, colour: str, shape: str) -> str:
    """One point: a dot, a hollow square, or a cross."""
    if shape == "dot":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'
    if shape == "square":
        return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="#ffffff" stroke="{colour}"/>'
    return f'<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8" stroke="{colour}" fill="none"/>'


def _panel(result: dict[str, Any], number: int, steps: int) -> Panel:
    rows = [row for row in result["rows"] if row["steps"] == steps and row["kind"] != "full"]
    panel = Panel(LEFT + number * (WIDTH + GAP), f"{steps} steps", [_point(row) for row in rows])
    fewer = [_point(row) for row in rows if row["kind"] == "fewer steps"]
    panel.series(fewer, GREY, "cross", dashed=True)
    own = [row for row in rows if row["kind"] == "deepcache"]
    for schedule, shape in (("uniform", "dot"), ("non-uniform", "square")):
        for depth in sorted({row["depth"] for row in own}):
            line = [_point(row) for row in own if (row["schedule"], row["depth"]) == (schedule, depth)]
            if line:
                panel.series(line, _DEPTH_COLOURS.get(depth, "#000000"), shape, dashed=shape == "square")
    return panel


def _point(row: dict[str, Any]) -> Point:
    return row["speedup"], row["latent_rms"], str(row["interval"] if row["kind"] == "deepcache" else row["of"])


def _steps(result: dict[str, Any]) -> list[int]:
    return sorted({row["steps"] for row in result["rows"]})


def _legend(y: float, result: dict[str, Any]) -> list[str]:
    where = result.get("gpu") or "CPU"
    items = [("dot", _DEPTH_COLOURS[depth], f"depth {depth}") for depth in _DEPTH_COLOURS]
    items += [("dot", GREY, "uniform"), ("square", GREY, "non-uniform"), ("cross", GREY, "full model, fewer steps")]
    parts = []
    for index, (shape, colour, name) in enumerate(items):
        x = LEFT + 10 + index * 105
        parts += [marker(x, y, colour, shape), text(x + 10, y + 4, name, "#202020", 12)]
    size, count = "x".join(map(str, result["size"])), result["batch"] * len(result["captions"])
    caption = (
        f"Numbers: the interval, or the steps. Each point: {count} images of {size}, the demo's trained model, "
        f"same seeds; {where}, {result['date'][:10]}."
    )
    return [*parts, text(LEFT, y + 30, caption, "#404040", 11)]


def text(x: float, y: float, value: str, colour: str, size: int, anchor: str = "start") -> str:
    """One line of text."""
    escaped = value.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" text-anchor="{anchor}">{escaped}</text>'
