"""The text of Graph Cache Report. Plain data: no torch, no ComfyUI."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from ..texts import Text
from .rows import LEAST_GAIN, ROLES, totals


def report(data: Mapping[str, Any]) -> Text:
    """Return the text of Graph Cache Report: a verdict, the totals, choices and measurements, and each capture."""
    text_lines: list[str] = [*_verdict(data), *totals(data), *_modules(data["modules"])]
    text_lines += map(_attention, data["attention"])
    text_lines += [_compared(each) for each in data["whole_calls"] if each["is_settled"]]
    for each in data["measurements"]:
        values = {name: each[name] for name in ("device", "date", "model")}
        text_lines.append(Text("measured on {device}, {date}: {model} {result}", **values, result=each["text"]))
    if left_out := sorted({name for module in data["modules"] for name in module["left_out"]}):
        text_lines.append(Text("left out of compiling: {names}", names=", ".join(left_out)))
    return Text.joined("\n", [*text_lines, *_captures(data["entries"])])


def _verdict(data: Mapping[str, Any]) -> Iterable[str]:
    """Summarize the measurements, "Fast: 1.8 times stock at 3 sizes", and the regions that failed."""
    ratios = [(each["stock_seconds"] / each["seconds"], each["size"]) for each in data["measurements"]]
    fast = [ratio for ratio, _ in ratios if ratio >= LEAST_GAIN]
    if not ratios and not data["failed"]["regions"]:
        yield Text("Speed not measured: press 'Measure against stock' in the panel")
    if fast:
        yield Text("Fast: {times} times stock at {count} sizes", times=f"{median(fast):.1f}", count=len(fast))
    if slow := [size for ratio, size in ratios if ratio <= 1 / LEAST_GAIN]:
        yield Text("Slower than stock: {sizes}", sizes=", ".join(slow))
    if data["failed"]["regions"]:
        yield data["failed"]["text"]


def _modules(modules: Iterable[Mapping[str, Any]]) -> Iterable[Text]:
    for module in modules:
        if module["blocks"]:
            blocks = ", ".join(f"{count} {origin}" for origin, count in sorted(module["blocks"].items()))
            text = "{done} of {total} regions compiled; blocks: {blocks}"
            yield Text(text, done=module["regions_compiled"], total=module["regions"], blocks=blocks)
            yield from (Text("  weights: {format}", format=text) for text in module["formats"])


def _attention(choice: Mapping[str, Any]) -> Text:
    """Name a shape's kernel and the reason: the times, the tokens of a nearby timed shape, or the failed kernels."""
    shape, like = ("x".join(map(str, choice[name] or ())) for name in ("q", "like"))
    times = ", ".join(f"{kernel} {ms:.2f} ms" for kernel, ms in sorted(choice["milliseconds"].items()))
    failed = ", ".join(choice["failed"])
    why = Text("as for {tokens} tokens", tokens=like) if like else times or Text("{kernels} failed", kernels=failed)
    return Text("attention of {shape} with {kernel}: {why}", shape=shape, kernel=choice["kernel"], why=why)


def _compared(comparison: Mapping[str, Any]) -> Text:
    """Say whether calls of a size run compiled or eager, with both times. comparison: see `CompiledVsEager.report`."""
    values = {
        "what": ROLES[comparison["role"]],
        "shape": "x".join(map(str, comparison["shape"])),
        "compiled": f"{comparison['seconds']:.3g}",
        "eager": f"{comparison['original_seconds']:.3g}",
    }
    text = "{what} {shape} runs compiled: {compiled} s, {eager} s eager on this device"
    if comparison["is_left_alone"]:
        text = "{what} {shape} falls back to eager: {compiled} s compiled, {eager} s eager on this device"
    return Text(text, **values)


def _captures(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table as narrow as possible, because the node shows it."""
    if not entries:
        return []
    wide = 2 + max(len(size_of(entry)) for entry in entries)
    return ["", f"{'size':<{wide}}{'what':<12}{'backend':<10}{'hits':>5}{'MiB':>8}"] + [
        f"{size_of(entry):<{wide}}{ROLES.get(entry['role'], entry['role']):<12}{entry['backend']:<10}{entry['hits']:>5}"
        f"{entry['bytes'] / 2**20:>8.1f}"
        for entry in entries
    ]


def size_of(entry: Mapping[str, Any]) -> str:
    """Return the size as the node shows it: "1024x1024, batch 2"; the latent's shape if the size is unknown."""
    return str(entry["size"] or "x".join(map(str, entry["latent_shape"])))
