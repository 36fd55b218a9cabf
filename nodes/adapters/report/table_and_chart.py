"""The cache's report for a user: a table as text, and a chart as an IMAGE."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

_WIDTH = 960
_ROW = 26
_INK, _PAPER, _BAR, _FAINT = "#222222", "#ffffff", "#3b7dd8", "#888888"


def table(data: dict[str, Any]) -> str:
    """The report as text: first the counters, then one line for each capture. data: from `cache_report.report`."""
    counters = data["counters"]
    lines = [
        f"{counters['region_compiles']} region compiles, {counters['region_loads']} loads, "
        f"{counters['captures']} captures, "
        f"{counters['replays']} replays, {counters['graph_calls']} calls through regions, "
        f"{counters['eager_calls']} eager calls",
        f"{counters['stall_seconds']:.1f} s spent compiling and capturing; "
        f"{data['bytes'] >> 20} of {data['budget_bytes'] >> 20} MiB used by captures",
    ]
    lines += [f"bypassed {count} times: {reason}" for reason, count in sorted(counters["bypasses"].items())]
    left_out = sorted({name for module in data["modules"] for name in module["left_out"]})
    if left_out:
        lines.append(f"left out of compiling: {', '.join(left_out)}")
    if data["entries"]:
        lines += ["", f"{'latent shape':<20}{'role':<12}{'backend':<11}{'hits':>6}{'MiB':>8}"]
    lines += [
        f"{_shape(entry):<20}{entry['role']:<12}{entry['backend']:<11}{entry['hits']:>6}{entry['bytes'] / 2**20:>8.1f}"
        for entry in data["entries"]
    ]
    return "\n".join(lines)


def chart(data: dict[str, Any]) -> torch.Tensor:
    """The counters, and a bar for each capture that shows its hits. Returns (1, height, width, 3), float32, 0 to 1."""
    lines = table(data).splitlines()[:3]  # the counters and the first bypass
    entries = data["entries"]
    height = _ROW * (len(lines) + len(entries) + 2)
    picture = Image.new("RGB", (_WIDTH, height), _PAPER)
    draw = ImageDraw.Draw(picture)
    for row, line in enumerate(lines):
        draw.text((16, 10 + row * _ROW), line, fill=_INK)
    top = _ROW * (len(lines) + 1)
    max_hits = max((entry["hits"] for entry in entries), default=0) or 1
    for row, entry in enumerate(entries):
        y = top + row * _ROW
        draw.text((16, y + 4), f"{_shape(entry)}  {entry['role']}", fill=_INK)
        draw.rectangle((260, y + 3, 260 + int(560 * entry["hits"] / max_hits), y + _ROW - 5), fill=_BAR)
        draw.text((830, y + 4), f"{entry['hits']} replays", fill=_FAINT)
    return torch.from_numpy(np.asarray(picture, dtype=np.float32) / 255.0)[None]


def _shape(entry: dict[str, Any]) -> str:
    return "x".join(map(str, entry["latent_shape"]))
