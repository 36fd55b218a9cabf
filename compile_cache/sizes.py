"""Image sizes in pixels: presets, parsing, and the nearest valid size."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import excerpt
from .texts import Text

CUSTOM = "custom"
NEAREST_VALID, NEAREST_READY, EXACT = "nearest valid", "nearest ready", "exact"  # ways to adjust a size
MINIMUM = 64
MAXIMUM = 8192
DEFAULT = 1024
MULTIPLES = ("8", "16", "32", "64")
# The last word of a preset's name is its size, so there is no second table.
# The SDXL presets are sizes from its training (Podell et al. 2023, appendix I).
PRESETS = (
    CUSTOM,
    "SD1.5 512x512",
    "SD1.5 512x768",
    "SD1.5 768x512",
    "SDXL 1024x1024",
    "SDXL 1152x896",
    "SDXL 896x1152",
    "SDXL 1216x832",
    "SDXL 832x1216",
    "SDXL 1344x768",
    "SDXL 768x1344",
    "SDXL 1536x640",
    "SDXL 640x1536",
    "960x720",
    "896x768",
    "720x720",
    "640x960",
    "1280x720",
)
_SAME_ASPECT = 1.05
_SIZE = re.compile(r"(\d{1,9})\s*[xX×]\s*(\d{1,9})")


@dataclass(frozen=True, slots=True)
class Size:
    """Width and height in pixels."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


def parse_size(text: str) -> Size:
    """Parse a size such as ``"960x720"``. Raises ValueError if `text` is not a size."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"'{excerpt(text)}' is not a size. Write width x height in pixels, like 960x720.")
    return Size(int(match[1]), int(match[2]))


def preset_size(preset: str) -> Size:
    """Return the size of a preset other than ``custom``. Raises ValueError, which lists the choices."""
    if preset == CUSTOM or preset not in PRESETS:
        choices = ", ".join(PRESETS[1:])
        raise ValueError(f"'{excerpt(preset)}' is not a preset with a size. Choose one of: {choices}.")
    return parse_size(preset.split()[-1])


def is_valid(size: Size, multiple: int) -> bool:
    """True if both sides are multiples of ``multiple`` and within MINIMUM and MAXIMUM."""
    return all(side % multiple == 0 and MINIMUM <= side <= MAXIMUM for side in (size.width, size.height))


def nearest_valid(size: Size, multiple: int) -> Size:
    """The nearest valid size; a side halfway between two multiples is rounded up."""
    return Size(_nearest_side(size.width, multiple), _nearest_side(size.height, multiple))


def asked_size(preset: str, width: int, height: int) -> Size:
    """The size of `preset`, or `width` x `height` (pixels) if the preset is ``custom``. Raises ValueError for another
    preset.
    """
    return Size(width, height) if preset == CUSTOM else preset_size(preset)


def resolve_size(preset: str, width: int, height: int, multiple: int | str, snaps: bool = False) -> Size:
    """Return the `asked_size`, or with `snaps` the valid size nearest to it.

    Without `snaps`, raises ValueError, which names the nearest valid size, if a side is not a multiple of `multiple`
    (pixels) or is out of range.
    """
    step = _checked_multiple(multiple)
    size = asked_size(preset, width, height)
    if is_valid(size, step):
        return size
    if snaps:
        return nearest_valid(size, step)
    remedy = f"The nearest valid size is {nearest_valid(size, step)}"
    if is_valid(size, int(MULTIPLES[0])):
        remedy += f"; or set multiple to {_largest_multiple(size)}, which {size} satisfies"
    raise ValueError(
        f"Size {size}: width and height must be multiples of {step} between {MINIMUM} and {MAXIMUM}. {remedy}."
    )


def nearest_ready(wanted: Size, ready: Iterable[Size], multiple: int | str) -> Size | None:
    """The size in `ready` with the nearest area and the same aspect ratio as `wanted` (within 5 %), or None."""
    step = _checked_multiple(multiple)
    fitting = [
        size for size in ready if is_valid(size, step) and _ratio(_aspect(size), _aspect(wanted)) <= _SAME_ASPECT
    ]
    return min(fitting, key=lambda size: (size != wanted, _ratio(_area(size), _area(wanted))), default=None)


def explain_snap(wanted: Size, size: Size, multiple: int | str) -> Text | str:
    """The result of `resolve_size` in words: "1000x704 instead of 1001x700: multiples of 8"."""
    if size == wanted:
        return str(size)
    text = "{size} instead of {wanted}: multiples of {multiple}"
    return Text(text, size=size, wanted=wanted, multiple=multiple)


def explain_choice(wanted: Size, found: Size | None) -> Text:
    """The result of `nearest_ready` in words: "208x136 instead of 216x136, because it is ready"."""
    if found is None:
        return Text("{size}: no size of this aspect ratio is ready", size=wanted)
    if found == wanted:
        return Text("{size} is ready", size=found)
    return Text("{size} instead of {wanted}, because it is ready", size=found, wanted=wanted)


def _aspect(size: Size) -> float:
    return size.width / size.height


def _area(size: Size) -> float:
    return size.width * size.height


def _ratio(a: float, b: float) -> float:
    """The larger number divided by the smaller."""
    return max(a, b) / min(a, b)


def _checked_multiple(multiple: int | str) -> int:
    if str(multiple) not in MULTIPLES:
        raise ValueError(f"Multiple {excerpt(multiple)!r} is not a choice. Use {', '.join(MULTIPLES)}.")
    return int(multiple)


def _largest_multiple(size: Size) -> int:
    return max(int(multiple) for multiple in MULTIPLES if is_valid(size, int(multiple)))


def _nearest_side(side: int, multiple: int) -> int:
    rounded = (side + multiple // 2) // multiple * multiple
    return min(max(rounded, MINIMUM), MAXIMUM)
