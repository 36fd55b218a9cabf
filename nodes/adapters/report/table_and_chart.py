"""The cache's report for a user: as text for a bug report, and as a chart."""

from __future__ import annotations

import sys
import textwrap
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from ....compile_cache.calls import report_rows, rows
from ..comfyui import version

_RUNS_IN_REPORT = 20
# A node is 300 to 500 pixels wide, so the chart is drawn for that width, at twice the resolution.
_WIDTH = 880
_ROW = 44
_FONT_SIZE = 24
_BARS_END = 720
_LETTERS = 66  # in a line of the chart
_INK, _PAPER, _BAR, _FAINT = "#222222", "#ffffff", "#3b7dd8", "#888888"


def report_text(data: dict[str, Any], runs: list[dict[str, Any]], settings: dict[str, str]) -> str:
    """The table with the machine before it and the latest runs after it: what a report of a problem needs.

    settings: variables that are set, in the environment or in ComfyUI's dialog.
    """
    python = sys.version.split()[0]
    lines = [
        f"Resolute {version.of_this_pack()}, ComfyUI {version.of_comfyui()}, torch {torch.__version__}, "
        f"Python {python}, {sys.platform}, on {data['device']['name']}",
        "settings: " + (", ".join(f"{name}={value}" for name, value in sorted(settings.items())) or "all at default"),
        "",
        report_rows.report(data),
        "",
    ]
    for run in runs[-_RUNS_IN_REPORT:]:
        lines.append(f"{run['model']} {run['role']}: {run['status']}".replace("\n", "; "))
        lines += [f"  {reason}" for reason in run["reasons"]]
    return "\n".join(lines)


def chart(data: dict[str, Any]) -> torch.Tensor:
    """Counts, and a bar for each capture that shows its hits. Returns (1, height, width, 3), float32, 0 to 1."""
    font = ImageFont.load_default(_FONT_SIZE)
    bars = _bars(data)
    lines = [part for line in rows.totals(data) for part in textwrap.wrap(line, _LETTERS)]
    picture = Image.new("RGB", (_WIDTH, _ROW * (len(lines) + len(bars) + 1)), _PAPER)
    draw = ImageDraw.Draw(picture)
    for row, line in enumerate(lines):
        draw.text((20, 20 + row * _ROW), line, fill=_INK if row == 0 else _FAINT, font=font)
    top = _ROW * (len(lines) + 0.5)
    left = 40 + max((draw.textlength(name, font=font) for name, _, _ in bars), default=0.0)
    most = max((value for _, value, _ in bars), default=0) or 1
    for row, (name, value, text) in enumerate(bars):
        y = top + row * _ROW
        draw.text((20, y + 6), name, fill=_INK, font=font)
        draw.rectangle((left, y + 8, left + max((_BARS_END - left) * value / most, 2), y + _ROW - 8), fill=_BAR)
        draw.text((_BARS_END + 16, y + 6), text, fill=_FAINT, font=font)
    return torch.from_numpy(np.asarray(picture, dtype=np.float32) / 255.0)[None]


def _bars(data: dict[str, Any]) -> list[tuple[str, int, str]]:
    """Name, value and text of each bar: the captures, or without any (on the CPU) how the calls were answered."""
    if data["entries"]:
        return [(report_rows.capture_name(entry), entry["hits"], f"{entry['hits']}x") for entry in data["entries"]]
    phrases = rows.counted(data["counters"])
    return [(phrases[name], data["counters"][name], "") for name in ("replays", "graph_calls", "eager_calls")]
