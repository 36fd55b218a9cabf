"""Pictures that training draws: one or two shapes on a shaded background, and the caption of each as numbers."""

from __future__ import annotations

import torch

SIDE = 64
SHAPES, COLOURS, SIZES, PLACES, BACKGROUNDS = 6, 8, 2, 9, 4
# A caption: (shape, colour, size, place) of each of two objects, and the background. Shape number SHAPES is no object.
FIELDS = (SHAPES + 1, COLOURS, SIZES, PLACES) * 2 + (BACKGROUNDS,)
_RGB = torch.tensor(
    [
        [0.9, 0.2, 0.2],
        [0.2, 0.7, 0.3],
        [0.2, 0.3, 0.9],
        [0.95, 0.85, 0.2],
        [0.6, 0.3, 0.8],
        [0.95, 0.55, 0.15],
        [0.2, 0.8, 0.85],
        [0.95, 0.95, 0.95],
    ]
)
_GROUNDS = torch.tensor([[0.05, 0.05, 0.08], [0.45, 0.45, 0.45], [0.75, 0.7, 0.6], [0.2, 0.25, 0.4]])


def captions(count: int, generator: torch.Generator) -> torch.Tensor:
    """Random captions: (count, 9) of int64, on the generator's device. Every second one has two objects."""
    device = generator.device
    fields = [torch.randint(0, size, (count,), generator=generator, device=device) for size in FIELDS]
    fields[0] %= SHAPES  # the first object is always there
    without = torch.rand(count, generator=generator, device=device) < 0.5
    fields[4] = torch.where(without, SHAPES, fields[4] % SHAPES)
    return torch.stack(fields, dim=1)


def draw(captions: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Pictures (count, 3, SIDE, SIDE) in [-1, 1]. Shade, exact place, turn and width are random."""
    device, count = captions.device, len(captions)

    def random(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, 1, 1, generator=generator, device=device)

    axis = (torch.arange(SIDE, device=device) + 0.5) / SIDE
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    angle = random(0, 6.283)
    shade = ((x - 0.5) * angle.cos() + (y - 0.5) * angle.sin()) * random(0.1, 0.4)
    picture = _GROUNDS.to(device)[captions[:, 8], :, None, None] + shade[:, None]
    for at in (4, 0):
        shape, colour, size, place = (captions[:, at + field].view(-1, 1, 1) for field in range(4))
        radius = torch.where(size == 0, 0.12, 0.22) * random(0.9, 1.1)
        dx = x - (0.25 + 0.25 * (place % 3)) - random(-0.04, 0.04)
        dy = y - (0.25 + 0.25 * (place // 3)) - random(-0.04, 0.04)
        turn = random(-0.5, 0.5)
        u, v = (dx * turn.cos() + dy * turn.sin()) / radius, (dy * turn.cos() - dx * turn.sin()) / radius
        inside = torch.sigmoid((1 - _distance(shape, u, v)) * radius * SIDE)
        stripes = 1 + 0.15 * torch.sin(u * 9) * (colour % 2)
        paint = _RGB.to(device)[captions[:, at + 1], :, None, None] * (stripes - 0.2 * v)[:, None]
        picture = torch.lerp(picture, paint, (inside * (shape < SHAPES))[:, None])
    return picture.clamp(0, 1) * 2 - 1


def _distance(shape: torch.Tensor, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """How far a point lies from the shape's middle; 1 on its edge."""
    circle, square, diamond = u.hypot(v), torch.maximum(u.abs(), v.abs()) * 1.15, (u.abs() + v.abs()) * 0.85
    triangle = torch.maximum(v * 1.3, u.abs() * 1.2 - v * 0.7 + 0.2)
    ring = 1 + (circle - 0.75).abs() * 4 - 1
    cross = torch.minimum(torch.maximum(u.abs() * 3, v.abs()), torch.maximum(v.abs() * 3, u.abs()))
    every = torch.stack([circle, square, diamond, triangle, ring, cross])
    return every.gather(0, shape.clamp(max=SHAPES - 1).expand_as(u)[None])[0]
