"""What a search did, in numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

_COUNTERS = ("signatures", "region_calls", "graph_calls", "replays", "captures", "region_compiles", "eager_calls")


@dataclass
class Tally:
    """Prompts are those with our nodes, unless they are called plain."""

    sequences: int = 0
    prompts: int = 0
    plain_prompts: int = 0
    compared: int = 0
    refused: int = 0  # ComfyUI itself refuses them or fails at them, with and without our nodes
    meaningless: int = 0  # the plain result is flat or no number
    sensitive: int = 0  # they differed by no more than a disturbance of weights by a millionth makes
    knife_edges: int = 0  # they differed because a node decided between two all but equal numbers
    unsteady: int = 0  # ComfyUI's own results differ as much from each other, and ours is one of them
    cancelled: int = 0
    failed: int = 0
    failures: int = 0
    worst: float = 0.0  # difference of latents that counted as the same
    bypasses: Counter[str] = field(default_factory=Counter)
    rises: Counter[str] = field(default_factory=Counter)

    def add(self, rise: dict[str, Any]) -> None:
        """Count what some prompts did, by how much each counter rose."""
        self.bypasses.update(rise["bypasses"])
        self.rises.update({name: value for name, value in rise.items() if name != "bypasses"})

    def __str__(self) -> str:
        own = {name: value for name, value in vars(self).items() if name not in ("bypasses", "rises", "worst")}
        parts = {**own, **{name: self.rises[name] for name in _COUNTERS}, "bypasses": dict(self.bypasses)}
        return f"fuzz: worst {self.worst:.2g}, " + ", ".join(f"{key.replace('_', ' ')} {parts[key]}" for key in parts)
