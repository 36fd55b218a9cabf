"""Sizes beyond a guard: a comparison vouches for its own alone, also after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from compile_cache.backends.inductor.backend import InductorBackend

from ....rig import TOKENS, TOLERANCE, Rig, seeded, tokens


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
    # For general sizes, which is wrong here too and does not count, then for these; the old code is wrong twice.
    with again.expect(region_compiles=1, verifications=4, region_calls=1, graph_calls=1):
        assert bound.error(tokens(5, batch=8)) <= TOLERANCE
