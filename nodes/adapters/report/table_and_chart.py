"""The cache's report for a user: a table as text, and a chart as an IMAGE."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from ..comfyui import version

_RUNS_IN_REPORT = 20
# A node is 300 to 500 pixels wide, so the chart is drawn for that width, at twice the resolution.
_WIDTH = 880
_ROW = 44
_FONT_SIZE = 24
_BARS_END = 720
_ROLES = {
    "unet": "sampling",
    "vae_decode": "decoding",
    "vae_encode": "encoding",
    "controlnet": "ControlNet",
    "deepcache_full": "full steps",
    "deepcache_fast": "fast steps",
}
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
    for module in data["modules"]:
        if module["blocks"]:
            blocks = ", ".join(f"{count} blocks {origin}" for origin, count in sorted(module["blocks"].items()))
            lines.append(f"{module['regions_compiled']} of {module['regions']} regions compiled: {blocks}")
            lines += [f"  weights: {text}" for text in module["formats"]]
    for each in data["attention"]:
        times = ", ".join(f"{kernel} {ms:.2f} ms" for kernel, ms in sorted(each["milliseconds"].items()))
        lines.append(f"attention of {'x'.join(map(str, each['q']))} with {each['kernel']}: {times}")
    lines += [f"measured on {each['device']}: {each['model']} {each['text']}" for each in data["measurements"]]
    left_out = sorted({name for module in data["modules"] for name in module["left_out"]})
    if left_out:
        lines.append(f"left out of compiling: {', '.join(left_out)}")
    if data["entries"]:
        wide = 2 + max(len(_size(entry)) for entry in data["entries"])  # as narrow as it can be: the node shows it
        lines += ["", f"{'size':<{wide}}{'what':<12}{'backend':<10}{'hits':>5}{'MiB':>8}"]
        lines += [
            f"{_size(entry):<{wide}}{_role(entry):<12}{entry['backend']:<10}{entry['hits']:>5}"
            f"{entry['bytes'] / 2**20:>8.1f}"
            for entry in data["entries"]
        ]
    return "\n".join(lines)


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
        table(data),
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
    lines = _headline(data)
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


def _headline(data: dict[str, Any]) -> list[str]:
    counters = data["counters"]
    lines = [
        f"{counters['region_compiles']} compiled, {counters['region_loads']} loaded, {counters['captures']} captured",
        f"prompts waited {counters['stall_seconds']:.1f} s; captures hold {data['bytes'] >> 20} of "
        f"{data['budget_bytes'] >> 20} MiB",
    ]
    if counters["bypasses"]:
        lines.append("bypassed: " + ", ".join(f"{count}x {code}" for code, count in counters["bypasses"].items()))
    return lines


def _bars(data: dict[str, Any]) -> list[tuple[str, int, str]]:
    """Name, value and text of each bar: the captures, or without any (on the CPU) how the calls were answered."""
    if data["entries"]:
        return [(f"{_size(entry)}  {_role(entry)}", entry["hits"], f"{entry['hits']}x") for entry in data["entries"]]
    counters = data["counters"]
    calls = {"replays": "replays", "compiled calls": "graph_calls", "uncompiled calls": "eager_calls"}
    return [(name, counters[key], str(counters[key])) for name, key in calls.items()]


def _size(entry: dict[str, Any]) -> str:
    """As the node shows it: "1024x1024, batch 2"; the latent's shape where the size is not known."""
    return str(entry["size"] or "x".join(map(str, entry["latent_shape"])))


def _role(entry: dict[str, Any]) -> str:
    return _ROLES.get(entry["role"], str(entry["role"]))
