"""Counts of a search."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

_COUNTERS = (
    "signatures", "region_calls", "graph_calls", "replays", "captures", "region_compiles", "region_loads",
    "eager_calls",
)  # fmt: skip


@dataclass
class Tally:
    """Counts of a search. Prompts have Resolute's nodes unless they are called plain."""

    sequences: int = 0
    prompts: int = 0
    plain_prompts: int = 0
    compared: int = 0
    refused: int = 0  # fail in ComfyUI itself, with and without Resolute's nodes
    meaningless: int = 0  # the plain result is flat or NaN
    sensitive: int = 0  # differ no more than with weights disturbed by a millionth
    rounded: int = 0  # in half precision, about as close to float32 as ComfyUI's own
    knife_edges: int = 0  # differ because a node compared two almost equal numbers
    unsteady: int = 0  # ComfyUI's own results differ as much from run to run, and ours is one of them
    cancelled: int = 0
    failed: int = 0
    failures: int = 0
    worst: float = 0.0  # largest difference of latents that counted as equal
    bypasses: Counter[str] = field(default_factory=Counter)
    rises: Counter[str] = field(default_factory=Counter)

    def add(self, rise: dict[str, Any]) -> None:
        """Add the increase of each counter."""
        self.bypasses.update(rise["bypasses"])
        self.rises.update({name: value for name, value in rise.items() if name != "bypasses"})

    def as_json(self) -> dict[str, Any]:
        """The counts by name."""
        own = {name: value for name, value in vars(self).items() if name not in ("bypasses", "rises")}
        return {**own, **{name: self.rises[name] for name in _COUNTERS}, "bypasses": dict(self.bypasses)}

    def __str__(self) -> str:
        parts = self.as_json()
        worst = parts.pop("worst")
        return f"fuzz: worst {worst:.2g}, " + ", ".join(f"{key.replace('_', ' ')} {parts[key]}" for key in parts)
