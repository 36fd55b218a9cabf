"""Rules for nodes that output numbers, and the size arithmetic that several rules share."""

from __future__ import annotations

import math
import re

from ....compile_cache.errors import excerpt
from ....compile_cache.sizes import resolve_size
from .node import Image, Node, Outputs, Value

# The options of core's ResolutionSelector.
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
    """Resolution, our own node. Raises ValueError for a size that the node would refuse."""
    if node.text("use", "exact") != "exact":
        raise node.unknown("it chooses the nearest ready size only when the prompt runs")
    width, height = node.integer("width"), node.integer("height")
    size = resolve_size(node.text("preset"), width, height, str(node.value("multiple")))
    return size.width, size.height


def resolution_selector(node: Node) -> Outputs:
    aspect, multiple = node.text("aspect_ratio"), node.integer("multiple", 8)
    if aspect not in _ASPECTS:
        raise node.unknown(f"Resolute does not know the aspect ratio '{excerpt(aspect)}'")
    wide, high = _ASPECTS[aspect]
    scale = math.sqrt(node.number("megapixels") * 1024 * 1024 / (wide * high))
    return round(wide * scale / multiple) * multiple, round(high * scale / multiple) * multiple


def integer(node: Node) -> Value:
    return node.integer("value")


def number(node: Node) -> Value:
    return node.number("value")


def converted(node: Node) -> Outputs:
    """Core's Convert Number: outputs a FLOAT and an INT."""
    value = node.value("value")
    if isinstance(value, str):
        value = value.strip()
        whole = re.fullmatch(r"[+-]?\d+", value)
        return float(value), int(value) if whole else int(float(value))
    return node.number("value"), node.integer("value")


def image_numbers(node: Node) -> Outputs:
    image = node.image("image")
    return image.width, image.height, image.batch


def selected_input(node: Node) -> str:
    """The name of the input that a switch outputs. ComfyUI does not evaluate the other one."""
    switch = node.value("switch")
    if not isinstance(switch, bool):
        raise node.unknown("its switch is known only when the prompt runs")
    return "on_true" if switch else "on_false"


def switched(node: Node) -> Value:
    return node.value(selected_input(node))


def scaled_sides(image: Image, width: int, height: int) -> tuple[int, int]:
    """Width and height of an image that is scaled. A side of 0 follows from the aspect ratio."""
    if width == 0 and height == 0:
        return image.width, image.height
    if width == 0:
        return max(1, round(image.width * height / image.height)), height
    if height == 0:
        return width, max(1, round(image.height * width / image.width))
    return width, height


def rotated_sides(width: int, height: int, rotation: str) -> tuple[int, int]:
    return (height, width) if rotation.startswith(("90", "270")) else (width, height)


def slice_length(side: int, start: int, length: int) -> int:
    """The length of `tensor[start : start + length]` along a side; a negative start counts from the end."""
    return len(range(side)[start : start + length])


def images_from_batch(node: Node, batch: int) -> int:
    """How many images core's From Batch nodes select out of `batch`."""
    index, length = node.integer("batch_index"), node.integer("length")
    start = max(0, min(batch - 1, index + batch if index < 0 else index))
    return min(batch - start, length)


def numbered_links(node: Node) -> list[str]:
    """The connected inputs of a node with a growing list of inputs (image0, image1, ...), in their order."""
    found = [(int(match[1]), name) for name in node.links() if (match := _LAST_NUMBER.search(name))]
    if not found:
        raise node.unknown("nothing is connected to it")
    return [name for _, name in sorted(found)]
