"""Rules for nodes that give numbers, and the arithmetic of sides that several rules share."""

from __future__ import annotations

import math
import re

from ....compile_cache.sizes import resolve_size
from .node import Image, Node, Outputs, Value

CELL = 8  # pixels along each side of a latent's cell, in every model that Resolute compiles

# As core's ResolutionSelector names them.
_ASPECTS = {
    "1:1 (Square)": (1, 1),
    "2:3 (Portrait Photo)": (2, 3),
    "3:2 (Photo)": (3, 2),
    "3:4 (Portrait Standard)": (3, 4),
    "4:3 (Standard)": (4, 3),
    "9:16 (Portrait Widescreen)": (9, 16),
    "16:9 (Widescreen)": (16, 9),
    "21:9 (Ultrawide)": (21, 9),
}
_LAST_NUMBER = re.compile(r"(\d{1,9})$")


def resolution(node: Node) -> Outputs:
    """Our own node, which refuses what the model cannot take."""
    if node.text("use", "exact") != "exact":
        raise node.unknown("it takes the nearest size that is ready when the prompt runs")
    width, height = node.integer("width"), node.integer("height")
    size = resolve_size(node.text("preset"), width, height, str(node.value("multiple")))
    return size.width, size.height


def resolution_selector(node: Node) -> Outputs:
    aspect, multiple = node.text("aspect_ratio"), node.integer("multiple", 8)
    if aspect not in _ASPECTS:
        raise node.unknown(f"the aspect ratio '{aspect}' is not one that Resolute knows")
    wide, high = _ASPECTS[aspect]
    scale = math.sqrt(node.number("megapixels") * 1024 * 1024 / (wide * high))
    return round(wide * scale / multiple) * multiple, round(high * scale / multiple) * multiple


def integer(node: Node) -> Value:
    return node.integer("value")


def number(node: Node) -> Value:
    return node.number("value")


def converted(node: Node) -> Outputs:
    """core's Convert Number: a FLOAT and an INT."""
    value = node.value("value")
    if isinstance(value, str):
        value = value.strip()
        whole = re.fullmatch(r"[+-]?\d+", value)
        return float(value), int(value) if whole else int(float(value))
    return node.number("value"), node.integer("value")


def image_numbers(node: Node) -> Outputs:
    image = node.image("image")
    return image.width, image.height, image.batch


def taken(node: Node) -> str:
    """The input that a switch hands on; the other one is not run."""
    switch = node.value("switch")
    if not isinstance(switch, bool):
        raise node.unknown("which way it is set is known only when the prompt runs")
    return "on_true" if switch else "on_false"


def switched(node: Node) -> Value:
    return node.value(taken(node))


def sides_at(image: Image, width: int, height: int) -> tuple[int, int]:
    """Width and height of an image that is scaled; 0 stands for the side that keeps the proportions."""
    if width == 0 and height == 0:
        return image.width, image.height
    if width == 0:
        return max(1, round(image.width * height / image.height)), height
    if height == 0:
        return width, max(1, round(image.height * width / image.width))
    return width, height


def sides_turned(width: int, height: int, rotation: str) -> tuple[int, int]:
    return (height, width) if rotation.startswith(("90", "270")) else (width, height)


def length_of_cut(side: int, start: int, length: int) -> int:
    """What a slice from `start` leaves of a side; a start below 0 counts from the end, as torch's does."""
    return len(range(side)[start : start + length])


def part_of_batch(node: Node, batch: int) -> int:
    """How many pictures core's From Batch nodes take out of `batch`."""
    index, length = node.integer("batch_index"), node.integer("length")
    start = max(0, min(batch - 1, index + batch if index < 0 else index))
    return min(batch - start, length)


def numbered_links(node: Node) -> list[str]:
    """The inputs of a node that takes as many as are connected, in their order."""
    found = [(int(match[1]), name) for name in node.links() if (match := _LAST_NUMBER.search(name))]
    if not found:
        raise node.unknown("nothing is connected to it")
    return [name for _, name in sorted(found)]
