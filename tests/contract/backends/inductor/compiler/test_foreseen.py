"""What other calls of a block will need: it is compiled after all that calls came to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compile_cache.modules.site import Hook, HookBuilder, RegionSite

from ....rig import TOKENS, TOLERANCE, Block, Convolution, original, random, relative_error, seeded, tokens
from .behind_rig import Behind


@pytest.fixture
def rig() -> Behind:
    """Its two workers are done at once."""
    made = Behind()
    made.workers.at_once = True
    return made


def in_two_states(module: Any) -> HookBuilder:
    """Hooks of a block that computes something else for an odd number of tokens; each state knows of the other."""

    def twice(block: Any, x: torch.Tensor) -> torch.Tensor:
        return original(block, original(block, x))

    def others(x: torch.Tensor) -> list[tuple[RegionSite, list[torch.Tensor]]]:
        return [(site, [x.new_empty((1, 1, 1)).expand(x.shape)]) for site in sites]

    sites = [
        RegionSite("block", "Block.even", module, original, (TOKENS,), foreseen=others),
        RegionSite("block", "Block.odd", module, twice, (TOKENS,), foreseen=others),
    ]

    def build(run: Any, bypass: Any) -> list[Hook]:
        return [Hook(module, lambda x: run(sites[x.shape[1] % 2], x), tuple(sites))]

    return build


def test_what_other_calls_of_a_block_need_is_made_after_all_that_calls_came_to(rig: Behind) -> None:
    rig.workers.at_once = False
    module = seeded(Block)
    bound = rig.bind(module, in_two_states(module))
    with torch.inference_mode():
        expected = module(module(tokens(5)))
    rig.call(bound, tokens(4))
    rig.call(rig.bind(seeded(Convolution)), random(2, 8, 6, 6))
    assert [task.is_foreseen for task in rig.queue.tasks] == [False, True, False]
    assert all(task.call.site.foreseen is None for task in rig.queue.tasks), "it would hold the block with its weights"
    rig.work()
    assert [job.label for job, _ in rig.workers.jobs] == ["Block.even", "Convolution", "Block.odd"]
    rig.come()
    rig.call(bound, tokens(4))
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=1):
        assert relative_error(bound(tokens(5), background_compile=True), expected) <= TOLERANCE


def test_a_call_that_waits_leaves_only_what_it_came_to(rig: Behind) -> None:
    module = seeded(Block)
    bound = rig.bind(module, in_two_states(module))
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=1):
        bound(tokens(4))
    assert rig.queue.left == 0


def test_what_is_foreseen_twice_still_comes_last(rig: Behind) -> None:
    for seed in range(2):
        module = seeded(Block, seed)
        rig.call(rig.bind(module, in_two_states(module)), tokens(4))
    found = sorted((task.call.region.label, task.is_foreseen) for task in rig.queue.tasks)
    assert found == [("Block.even", False), ("Block.odd", True)]
