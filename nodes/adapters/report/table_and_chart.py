"""The cache's report for a user: a table as text, and a chart as an IMAGE."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from ....compile_cache.texts import Text
from ..comfyui import version

_RUNS_IN_REPORT = 20
_COUNTED = ("region_compiles", "region_loads", "captures", "replays", "graph_calls", "eager_calls")
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


def table(data: dict[str, Any]) -> Text:
    """The report as text: first the counters, then one line for each capture. data: from `cache_report.report`."""
    counters = data["counters"]
    lines: list[str] = [
        Text(
            "{region_compiles} region compiles, {region_loads} loads, {captures} captures, {replays} replays, "
            "{graph_calls} calls through regions, {eager_calls} eager calls",
            **{name: counters[name] for name in _COUNTED},
        ),
        Text(
            "{seconds} s spent compiling and capturing; {used} of {budget} MiB used by captures",
            seconds=f"{counters['stall_seconds']:.1f}",
            used=data["bytes"] >> 20,
            budget=data["budget_bytes"] >> 20,
        ),
    ]
    lines += [
        Text("bypassed {count} times: {code}", count=count, code=code)
        for code, count in sorted(counters["bypasses"].items())
    ]
    for module in data["modules"]:
        if module["blocks"]:
            blocks = ", ".join(f"{count} {origin}" for origin, count in sorted(module["blocks"].items()))
            text = "{done} of {total} regions compiled; blocks: {blocks}"
            lines.append(Text(text, done=module["regions_compiled"], total=module["regions"], blocks=blocks))
            lines += [Text("  weights: {format}", format=text) for text in module["formats"]]
    for each in data["attention"]:
        times = ", ".join(f"{kernel} {ms:.2f} ms" for kernel, ms in sorted(each["milliseconds"].items()))
        shape = "x".join(map(str, each["q"]))
        lines.append(
            Text("attention of {shape} with {kernel}: {times}", shape=shape, kernel=each["kernel"], times=times)
        )
    lines += [_compared(each) for each in data["whole_calls"] if each["is_settled"]]
    for each in data["measurements"]:
        text = "measured on {device}: {model} {result}"
        lines.append(Text(text, device=each["device"], model=each["model"], result=each["text"]))
    left_out = sorted({name for module in data["modules"] for name in module["left_out"]})
    if left_out:
        lines.append(Text("left out of compiling: {names}", names=", ".join(left_out)))
    if data["entries"]:
        wide = 2 + max(len(_size(entry)) for entry in data["entries"])  # as narrow as it can be: the node shows it
        lines += ["", f"{'size':<{wide}}{'what':<12}{'backend':<10}{'hits':>5}{'MiB':>8}"]
        lines += [
            f"{_size(entry):<{wide}}{_role(entry):<12}{entry['backend']:<10}{entry['hits']:>5}"
            f"{entry['bytes'] / 2**20:>8.1f}"
            for entry in data["entries"]
        ]
    return Text.joined("\n", lines)


def _compared(found: dict[str, Any]) -> Text:
    """A line that says how a decode or an encode runs, with the seconds of both. found: see `WholeCalls.report`."""
    given = {
        "what": _ROLES[found["role"]],
        "shape": "x".join(map(str, found["shape"])),
        "compiled": f"{found['seconds']:.3g}",
        "original": f"{found['original_seconds']:.3g}",
    }
    if found["is_left_alone"]:
        return Text(
            "{what} {shape} is left alone: {compiled} s compiled, {original} s as it is on this device", **given
        )
    return Text("{what} {shape} runs compiled: {compiled} s, {original} s as it is on this device", **given)


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
