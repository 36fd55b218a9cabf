"""Prompts of random sizes, batches and LoRAs, for the short soak here and the long one of benchmarks/soak.py."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Visit:
    """One prompt of a trace. width, height: in pixels. lora: "" for none."""

    kind: str
    width: int
    height: int
    batch: int
    lora: str
    strength: float
    seed: int


def trace(prompts: int, kinds: Sequence[str], sides: Sequence[int], shapes: int = 40, seed: int = 1) -> Iterator[Visit]:
    """Prompts that visit `shapes` shapes of each kind, the first ones more often. A model stays for some prompts."""
    draw = random.Random(seed)
    known = {
        kind: [(draw.choice(sides), draw.choice(sides), draw.choice((1, 1, 2))) for _ in range(shapes)]
        for kind in kinds
    }
    kind = kinds[0]
    for number in range(prompts):
        if draw.random() < 0.2:
            kind = draw.choice(kinds)
        shape = known[kind][min(int(draw.expovariate(6 / shapes)), shapes - 1)]
        lora = draw.choice(("", "", "a", "b"))
        yield Visit(kind, *shape, lora, draw.choice((1.0, 0.5)), 1000 + number)
