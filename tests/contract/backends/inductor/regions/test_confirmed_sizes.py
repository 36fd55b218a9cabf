"""Sizes beyond a guard: for which of them a comparison vouches, also after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.backends.inductor.lower.tracing import FEATURE_MAP

from ....rig import TOKENS, TOLERANCE, Rig, random, seeded, tokens


class RightAt513Tokens(nn.Module):
    """Adds something to long inputs, which is nothing at 513 tokens and 0.64 at 1026."""

    dims = (TOKENS,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[1] <= 512 else x * 2 + (x.shape[1] - 513) / 800


class RightAtBatchTwo(nn.Module):
    """Adds something to small batches, which is nothing at a batch of two."""

    dims = (TOKENS,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 12 else x * 2 + (x.shape[0] - 2)


def test_code_that_agreed_beyond_its_guards_is_compared_at_each_other_size_there(cold: Rig) -> None:
    bound = cold.bind(seeded(RightAt513Tokens))
    assert bound.error(tokens(100)) <= TOLERANCE
    with cold.expect(verifications=1, region_calls=1, graph_calls=1):
        assert bound.error(tokens(513)) <= TOLERANCE
    with cold.expect(region_compiles=1, verifications=2, region_calls=1, graph_calls=1):
        assert bound.error(tokens(1026)) <= TOLERANCE
    with cold.expect(region_calls=2, graph_calls=2):  # the new trace has these sizes within its guards
        for count in (514, 8192):
            assert bound.error(tokens(count)) <= TOLERANCE


def test_right_code_is_compared_once_at_each_such_size_and_traced_no_more(cold: Rig) -> None:
    class Same(nn.Module):
        dims = (TOKENS,)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.shape[1] <= 512 else x + x

    bound = cold.bind(seeded(Same))
    bound(tokens(100))
    with cold.expect(verifications=3, region_calls=6, graph_calls=6):
        for count in (600, 601, 1200, 601, 1200, 600):
            assert bound.error(tokens(count)) <= TOLERANCE


def test_a_restart_knows_at_which_sizes_kept_code_was_right(tmp_path: Path) -> None:
    def process() -> Rig:
        config: dict[str, Any] = {"store_folder": tmp_path / "store", "source": "one", "workers": 0}
        return Rig(InductorBackend(), **config)

    first = process()
    with first.expect(region_compiles=1, verifications=1, region_calls=1, graph_calls=1):
        assert first.bind(seeded(RightAtBatchTwo)).error(tokens(5, batch=2)) <= TOLERANCE
    again = process()
    bound = again.bind(seeded(RightAtBatchTwo))
    with again.expect(region_loads=1, region_calls=1, graph_calls=1):
        assert bound.error(tokens(5, batch=2)) <= TOLERANCE
    # The old code is wrong once. New code for general sizes is wrong too and does not count; code for these is right.
    with again.expect(region_compiles=1, verifications=3, region_calls=1, graph_calls=1):
        assert bound.error(tokens(5, batch=8)) <= TOLERANCE


class Normed(nn.Module):
    """torch's operators ask whether the batch is 1."""

    dims = (FEATURE_MAP,)

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.norm(x))


class NormedAndWrongAlone(Normed):
    """Its own code asks the same, after the operators: alone, a large map gets something added."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out + 1 if x.shape[0] == 1 and x.shape[2] > 8 else out


@pytest.mark.parametrize(("kind", "compared"), [(Normed, 0), (NormedAndWrongAlone, 1)])
def test_a_comparison_of_a_batch_of_one_vouches_for_other_maps_where_only_operators_ask(
    cold: Rig, kind: type[nn.Module], compared: int
) -> None:
    bound = cold.bind(seeded(kind))
    with cold.expect(region_compiles=1, verifications=1, region_calls=1, graph_calls=1):
        assert bound.error(random(1, 16, 6, 6)) <= TOLERANCE
    for size in (5, 7):
        with cold.expect(verifications=compared, region_calls=1, graph_calls=1):
            assert bound.error(random(1, 16, size, 6)) <= TOLERANCE
    assert bound.error(random(1, 16, 12, 6)) <= TOLERANCE
