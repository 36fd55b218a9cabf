"""Draws the training images of the demo model: one or two plain shapes on a background, with captions.

The same seed gives the same images. A batch is drawn with tensor arithmetic over all pixels, on any device.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from scripts.models.demo_model.captions import BACKGROUND, BACKGROUNDS, COLOURS, NUMBERS, POSITIONS, SHAPES, SIZES

_RGB = {
    "red": (0.88, 0.15, 0.16),
    "orange": (0.97, 0.55, 0.10),
    "yellow": (0.97, 0.86, 0.20),
    "green": (0.15, 0.65, 0.28),
    "blue": (0.15, 0.32, 0.85),
    "purple": (0.55, 0.22, 0.70),
    "white": (0.94, 0.94, 0.92),
    "grey": (0.55, 0.57, 0.60),
    "black": (0.10, 0.10, 0.13),
}
# Radii are fractions of the shorter side, centres are fractions of width and height.
_RADIUS = {"small": 0.12, "large": 0.20}
_CENTRE = {"left": (0.25, 0.5), "right": (0.75, 0.5), "top": (0.5, 0.25), "bottom": (0.5, 0.75), "centre": (0.5, 0.5)}
# Two objects are opposite each other, so that neither hides the other.
_PAIRS = (("left", "right"), ("right", "left"), ("top", "bottom"), ("bottom", "top"))
_JITTER = 0.03
# How much lighter a shape is at its upper left than at its lower right, and a background at its top than at its bottom.
_SHADE, _GRADIENT = 0.12, 0.06


@dataclass(frozen=True, slots=True)
class Scene:
    """One image: objects as (size, colour, shape, position), background, and random offsets of the objects."""

    objects: tuple[tuple[str, str, str, str], ...]
    background: str
    jitter: tuple[tuple[float, float, float], ...]  # per object: right, down, radius; each -1 to 1

    @property
    def caption(self) -> str:
        """The caption, in the words of demo_model/captions.py."""
        return ", ".join([*(" ".join(words) for words in self.objects), f"{self.background} {BACKGROUND}"])


def scenes(seed: int, count: int, objects: int) -> list[Scene]:
    """``count`` random scenes of ``objects`` (1 or 2) objects each."""
    draw = random.Random(seed)
    return [_scene(draw, objects) for _ in range(count)]


def _scene(draw: random.Random, objects: int) -> Scene:
    places = (draw.choice(POSITIONS),) if objects == 1 else draw.choice(_PAIRS)
    things = tuple((draw.choice(SIZES), draw.choice(COLOURS), draw.choice(SHAPES), place) for place in places)
    jitter = tuple((draw.uniform(-1, 1), draw.uniform(-1, 1), draw.uniform(-1, 1)) for _ in things)
    return Scene(things, draw.choice(BACKGROUNDS), jitter)


def caption_numbers(batch: list[Scene]) -> torch.Tensor:
    """Word numbers, (scenes, objects + 1, 4); each row equals ``captions.numbers(scene.caption)``."""
    rows = [
        [
            *([NUMBERS[word] for word in words] for words in scene.objects),
            [0, NUMBERS[scene.background], NUMBERS[BACKGROUND], 0],
        ]
        for scene in batch
    ]
    return torch.tensor(rows)


def draw(batch: list[Scene], width: int, height: int, device: Any = "cpu") -> torch.Tensor:
    """Images as (scenes, 3, height, width), 0 to 1. All scenes must have the same number of objects."""
    short = min(width, height)
    x = (torch.arange(width, device=device) + 0.5).view(1, 1, width)
    y = (torch.arange(height, device=device) + 0.5).view(1, height, 1)
    light = 1 + _GRADIENT * (1 - 2 * y / height) + 0 * x
    pictures = _colours([scene.background for scene in batch], device) * light.unsqueeze(1)
    for index in range(len(batch[0].objects)):
        things = [scene.objects[index] for scene in batch]
        jitter = torch.tensor([scene.jitter[index] for scene in batch], device=device)[..., None, None]
        radius = torch.tensor([_RADIUS[thing[0]] for thing in things], device=device).view(-1, 1, 1) * short
        radius = radius * (1 + 0.1 * jitter[:, 2])
        centre = torch.tensor([_CENTRE[thing[3]] for thing in things], device=device)[..., None, None]
        u = (x - centre[:, 0] * width - jitter[:, 0] * _JITTER * short) / radius
        v = (y - centre[:, 1] * height - jitter[:, 1] * _JITTER * short) / radius
        distances = torch.stack([shape(u, v) for shape in _SHAPES.values()])
        which = torch.tensor([list(_SHAPES).index(thing[2]) for thing in things], device=device)
        distance = distances[which, torch.arange(len(things), device=device)] * radius
        cover = (0.5 - distance).clamp(0, 1).unsqueeze(1)  # anti-aliased over one pixel
        paint = _colours([thing[1] for thing in things], device) * (1 - _SHADE * (u + v)).unsqueeze(1)
        pictures = pictures + cover * (paint - pictures)
    return pictures.clamp(0, 1)


def _colours(names: list[str], device: Any) -> torch.Tensor:
    return torch.tensor([_RGB[name] for name in names], device=device)[..., None, None]


# Signed distances to the edge of each shape, in units of its radius; y grows downwards.
def _box(u: torch.Tensor, v: torch.Tensor, wide: float, high: float) -> torch.Tensor:
    return torch.maximum(u.abs() - wide, v.abs() - high)


_SHAPES = {
    "circle": lambda u, v: torch.hypot(u, v) - 1,
    "square": lambda u, v: _box(u, v, 0.88, 0.88),
    "triangle": lambda u, v: torch.maximum(0.866 * u.abs() - 0.5 * v - 0.5, v - 0.7),
    "diamond": lambda u, v: (u.abs() + v.abs() - 1.15) * 0.707,
    "ring": lambda u, v: (torch.hypot(u, v) - 0.78).abs() - 0.25,
    "cross": lambda u, v: torch.minimum(_box(u, v, 1.0, 0.32), _box(u, v, 0.32, 1.0)),
}
assert tuple(_SHAPES) == SHAPES
