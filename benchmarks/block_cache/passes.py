"""The passes of a block cache, CUDA graphs where there is CUDA, and a sampler that runs them by a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .pictures import SIDE
from .transformer import Transformer, no_caption

GUIDANCE, SHIFT = 3.0, 3.0
Predict = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]  # number of the step, x, t -> velocity


def sigmas(steps: int, device: str) -> torch.Tensor:
    """Noise levels from 1 to 0 with the shift that flow models use: (steps + 1,)."""
    t = torch.linspace(1, 0, steps + 1, device=device)
    return SHIFT * t / (1 + (SHIFT - 1) * t)


class Graph:
    """One function of static inputs, replayed as a CUDA graph; on a CPU it is called."""

    def __init__(self, run: Callable[[], torch.Tensor], device: str) -> None:
        self._run, self._graph, self._out = run, None, torch.empty(0)
        if device != "cuda":
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._out = run()

    def __call__(self) -> torch.Tensor:
        if self._graph is None:
            return self._run()
        self._graph.replay()
        return self._out


@dataclass
class Passes:
    """A full pass, which leaves what the middle blocks added, and a fast pass, which adds that again.

    first, last: how many blocks a fast pass computes at each end. Both rows of classifier-free guidance run together.
    """

    model: Transformer
    caption: torch.Tensor
    first: int
    last: int
    device: str
    residual: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        rows = torch.cat([self.caption, no_caption(self.caption)])
        self._x = torch.zeros(len(rows), 3, SIDE, SIDE, device=self.device)
        self._t = torch.ones(len(rows), device=self.device)
        self._rows = rows
        self.residual = torch.zeros_like(self.model.begin(self._x, self._t, rows)[0])
        self.full = Graph(lambda: self._compute(is_full=True), self.device)
        self.fast = Graph(lambda: self._compute(is_full=False), self.device)

    def reset(self, caption: torch.Tensor) -> None:
        self._rows.copy_(torch.cat([caption, no_caption(caption)]))

    def run(self, x: torch.Tensor, t: torch.Tensor, is_full: bool) -> torch.Tensor:
        """The velocity of both rows; x: (2 count, 3, SIDE, SIDE). It is overwritten by the next pass."""
        self._x.copy_(x)
        self._t.copy_(t.expand_as(self._t))
        return (self.full if is_full else self.fast)()

    def _compute(self, is_full: bool) -> torch.Tensor:
        blocks = list(self.model.blocks)
        h, vector = self.model.begin(self._x, self._t, self._rows)
        for block in blocks[: self.first]:
            h = block(h, vector)
        if is_full:
            before = h
            for block in blocks[self.first : len(blocks) - self.last]:
                h = block(h, vector)
            self.residual.copy_(h - before)
        else:
            h = h + self.residual
        for block in blocks[len(blocks) - self.last :]:
            h = block(h, vector)
        return self.model.end(h, vector).float()


def noise(seed: int, count: int, device: str) -> torch.Tensor:
    """Noise (count, 3, SIDE, SIDE), the same on every device."""
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed)).to(device)


def sample(predict: Predict, x: torch.Tensor, steps: int) -> torch.Tensor:
    """Euler's method over the flow, with classifier-free guidance. Returns pictures in [-1, 1]."""
    levels = sigmas(steps, x.device.type)
    for step in range(steps):
        with_caption, without = predict(step, torch.cat([x, x]), levels[step]).chunk(2)
        x = x + (levels[step + 1] - levels[step]) * (without + GUIDANCE * (with_caption - without))
    return x.clamp(-1, 1)


def scheduled(passes: Passes, full_steps: Sequence[int]) -> Predict:
    """Full passes at these steps, fast ones at the others."""
    chosen = set(full_steps)
    return lambda step, x, t: passes.run(x, t, step in chosen)
