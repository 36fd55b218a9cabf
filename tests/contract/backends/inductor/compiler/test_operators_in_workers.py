"""Workers compile blocks with operators that are not torch's."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from compile_cache.attention import chooser
from compile_cache.backends.inductor.backend import InductorBackend

from ....rig import TOLERANCE, Attention, Block, Rig, random, relative_error, seeded

PACKAGE = """
import torch

@torch.library.custom_op("resolute_test_kernels::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@doubled.register_fake
def _(x):
    return torch.empty_like(x)
"""


class OwnAttention(Attention):
    """With the operator that chooses a kernel, as every transformer block on NVIDIA."""

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        q, k = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q(x), self.k(context)))
        attended = chooser.operator()(q, k, k, None).reshape(x.shape)
        return x + self.out(attended)


class ForeignKernel(Block):
    """With an operator of an installed package, as those of comfy-kitchen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.resolute_test_kernels.doubled(self.linear(x)) + x


class Kernels(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.foreign = OwnAttention(), ForeignKernel()

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.own(x, context), self.foreign(context[..., :4])


@pytest.mark.long
def test_blocks_with_operators_that_are_not_torchs_are_compiled_by_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the prompt's process they would be compiled one after the other."""
    (tmp_path / "resolute_test_kernels.py").write_text(PACKAGE, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    importlib.import_module("resolute_test_kernels")
    one = Rig(InductorBackend(), workers=2)
    model = seeded(Kernels)
    given = random(2, 5, 16), random(2, 7, 16, seed=1)
    results = one.bind(model)(*given)
    for found, expected in zip(results, model(*given), strict=True):
        assert relative_error(found, expected) <= TOLERANCE
    counted = one.cache.stats.counters
    assert (counted.region_compiles, counted.compile_failures, counted.region_calls) == (2, 0, 2)
    assert len([event for event in one.cache.stats.events if event.kind == "trace"]) == 2
