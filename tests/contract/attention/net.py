"""A model whose attention is the operator. Not in a test's file: pytest rewrites the code there, and so its digest."""

from __future__ import annotations

import torch
from torch import nn

from compile_cache.attention import chooser as attention

from ..rig import CONTEXT, TOKENS, Attention, random


class Chosen(Attention):
    """A block whose attention is the operator."""

    dims = (TOKENS, CONTEXT)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        def split(t: torch.Tensor) -> torch.Tensor:
            return t.reshape(t.shape[0], -1, self.heads, t.shape[-1] // self.heads).transpose(1, 2)

        q, k, v = split(self.q(self.norm(x))), split(self.k(context)), split(self.v(context))
        return x + self.out(attention.operator()(q, k, v).reshape(x.shape))


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module] = Chosen) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, context)
        return x


def net_inputs(batch: int = 2, tokens: int = 9, context: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    return random(batch, tokens, 16), random(batch, context, 16, seed=1)
