"""Draws a result of `soak` as SVG: the memory in use after each prompt, on the device and on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _TOP = 760, 260, 70, 40
_SERIES = {"device_mib": ("device", "#b5482a"), "host_mib": ("host", "#2f7f86")}
_GIB = 1024


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """rows: with `device_mib` and `host_mib`, one for each prompt."""
    most = max(max(row[name] for name in _SERIES) for row in rows) * 1.1
    parts = [_text(_LEFT, _TOP - 16, f"Memory in use after each of {len(rows)} prompts, in GiB", 14)]
    for tick in range(0, int(most / _GIB) + 1, max(1, round(most / _GIB / 6))):
        y = _y(tick * _GIB, most)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_LEFT + _WIDTH}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        parts.append(_text(_LEFT - 28, y + 4, str(tick), 11))
    for name, (label, colour) in _SERIES.items():
        values = [row[name] for row in rows]
        points = " ".join(
            f"{_LEFT + _WIDTH * number / max(len(values) - 1, 1):.1f},{_y(value, most):.1f}"
            for number, value in enumerate(values)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(_text(_LEFT + _WIDTH + 8, _y(values[-1], most) + 4, label, 12, colour))
    parts.append(_text(_LEFT + _WIDTH / 2, _TOP + _HEIGHT + 24, "prompts", 12))
    size = f'width="{_LEFT + _WIDTH + 80}" height="{_TOP + _HEIGHT + 40}"'
    background = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{background}{"".join(parts)}</svg>\n'


def _y(value: float, most: float) -> float:
    return _TOP + _HEIGHT * (1 - value / most)


def _text(x: float, y: float, text: str, size: int, colour: str = "#202020") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-family="sans-serif" font-size="{size}" fill="{colour}">{text}</text>'
