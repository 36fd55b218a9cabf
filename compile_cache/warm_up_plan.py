"""Parse the shapes to warm up, and format the results. Plain data: no torch, no ComfyUI."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import UserError, excerpt
from .sizes import CUSTOM, MULTIPLES, PRESETS, Size, parse_size, preset_size, resolve_size

# Limits and defaults of the Warm Up node, of a warm-up request and of a scanned workflow.
MAX_BATCH = 64  # images
MAX_CHUNKS = 32  # of 77 tokens
MAX_CFG = 100.0
CFG = 7.0  # every cfg but 1 gives the same shapes
MIN_TILE = 64  # pixels; the minimum of core's VAE Decode (Tiled)
OVERLAP = 64  # of tiles, in pixels
_MAX_ITEMS = 256  # more is almost always a mistake: the lists multiply
_SEPARATORS = re.compile(r"[,;\n]+")


@dataclass(frozen=True, slots=True)
class Item:
    """One shape: size in pixels, images per batch, and chunks of 77 tokens per text.

    chunks: None if the actual texts are known; then their lengths decide.
    """

    size: Size
    batch: int = 1
    chunks: int | None = 1

    @property
    def work(self) -> int:
        return self.size.width * self.size.height * self.batch

    def __str__(self) -> str:
        text = "" if self.chunks in (None, 1) else f", {77 * self.chunks} tokens"
        return f"{self.size}{f' batch {self.batch}' if self.batch > 1 else ''}{text}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one item. seconds: wall time; bytes: size of its captures; detail: what was done, or the error."""

    item: str
    what: str  # "model", "VAE"
    state: str  # one of STATES
    seconds: float = 0.0
    bytes: int = 0
    detail: str = ""


READY, WARMED, FAILED = "ready", "warmed", "failed"
STATES = (READY, WARMED, FAILED)


def plan(sizes: str, batch_sizes: str, prompt_chunks: str | None) -> list[Item]:
    """Return every combination, the largest first, so that the smaller ones can share the memory that it reserves.

    sizes: "1024x1024, 720x960", presets, or a family of presets ("SDXL"), separated by commas or new lines.
    batch_sizes, prompt_chunks: whole numbers, "1, 2, 4". Raises UserError, which names the entry and what to write.
    """
    given = dict.fromkeys(_sizes(sizes))
    batches = dict.fromkeys(_numbers("batch_sizes", batch_sizes, MAX_BATCH))
    chunks: Iterable[int | None] = (
        [None] if prompt_chunks is None else _numbers("prompt_chunks", prompt_chunks, MAX_CHUNKS)
    )
    chunks = dict.fromkeys(chunks)
    count = len(given) * len(batches) * len(chunks)
    if count > _MAX_ITEMS:  # checked before the product: three long lists would exhaust any memory
        raise UserError(
            f"{count} shapes are too many; the limit is {_MAX_ITEMS}. Write fewer sizes, batch sizes or chunks."
        )
    items = [Item(*each) for each in itertools.product(given, batches, chunks)]
    return sorted(items, key=lambda item: (item.work, item.chunks or 0), reverse=True)


def _sizes(text: str) -> list[Size]:
    found = [size for entry in _entries("sizes", text, "1024x1024") for size in _parse_entry(entry)]
    try:
        return [resolve_size(CUSTOM, size.width, size.height, MULTIPLES[0]) for size in found]
    except ValueError as error:
        raise UserError(f"sizes: {error}") from None


def _parse_entry(entry: str) -> list[Size]:
    wanted = entry.casefold()
    family = [
        preset_size(name)
        for name in PRESETS
        if name != CUSTOM and wanted in (name.casefold(), name.split()[0].casefold())
    ]
    if family:
        return family
    try:
        return [parse_size(entry)]
    except ValueError:
        families = sorted({name.split()[0] for name in PRESETS if " " in name})
        raise UserError(
            f"sizes: '{excerpt(entry)}' is not a size. Write width x height in pixels (960x720), or "
            f"{' or '.join(families)} for all usual sizes of that family."
        ) from None


def _numbers(name: str, text: str, maximum: int) -> list[int]:
    numbers = []
    for entry in _entries(name, text, "1"):
        if not (entry.isascii() and entry.isdigit() and len(entry) < 9 and 1 <= int(entry) <= maximum):
            raise UserError(f"{name}: '{excerpt(entry)}' is not a whole number from 1 to {maximum}. For example: 1, 2.")
        numbers.append(int(entry))
    return numbers


def _entries(name: str, text: str, example: str) -> list[str]:
    entries = [entry.strip() for entry in _SEPARATORS.split(text) if entry.strip()]
    if not entries:
        raise UserError(f"{name} is empty. For example: {example}.")
    return entries


def table(outcomes: Iterable[Outcome]) -> str:
    """Return a table with one line per item, and a summary line."""
    rows = list(outcomes)
    wide = 2 + max([5, *(len(row.item) for row in rows)])  # as narrow as possible, because the node shows it
    lines = [f"{'shape':<{wide}}{'what':<7}{'state':<8}{'seconds':>8}{'MiB':>7}  detail"]
    lines += [
        f"{row.item:<{wide}}{row.what:<7}{row.state:<8}{row.seconds:>8.2f}{row.bytes / 2**20:>7.1f}  "
        f"{row.detail}".rstrip()
        for row in rows
    ]
    counts = {state: sum(row.state == state for row in rows) for state in STATES}
    summary = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    lines.append(f"{summary}; {sum(row.seconds for row in rows):.1f} s")
    return "\n".join(lines)
