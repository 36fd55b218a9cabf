"""A power whose base is a number that follows the sizes of a call, as in the rotary tables of PiD."""

from __future__ import annotations

import torch
from torch import nn

from ....rig import TOKENS, TOLERANCE, Rig, seeded, tokens


class Rotary(nn.Module):
    dims = (TOKENS,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = 10000.0 * (x.shape[1] / 7) ** 1.5
        return x * (1 / base ** torch.linspace(0, 1, x.shape[-1], dtype=torch.float64)).to(x.dtype)


def test_it_compiles_once_for_all_sizes(cold: Rig) -> None:
    bound = cold.bind(seeded(Rotary))
    with cold.expect(region_compiles=1, verifications=1, region_calls=3, graph_calls=3):
        for count in (9, 33, 5):
            assert bound.error(tokens(count)) <= TOLERANCE
