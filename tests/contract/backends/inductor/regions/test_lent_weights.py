"""Weights that are lent to a site: only where its code is looked for, compared or run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from compile_cache.call_policy import CallPolicy
from compile_cache.errors import StillMissingError
from compile_cache.modules.site import Hook, HookBuilder

from ....rig import TOLERANCE, Block, hooks_of, seeded, tokens
from ..compiler.behind_rig import Behind


class Lent:
    """Hooks whose sites are lent their weights, and how often each call did."""

    def __init__(self, module: nn.Module) -> None:
        self.times = 0
        self.build = self._build(hooks_of(module))

    @contextlib.contextmanager
    def lend(self) -> Iterator[None]:
        self.times += 1
        yield

    def _build(self, build: HookBuilder) -> HookBuilder:
        def build_lent(run: Any, bypass: Any) -> Sequence[Hook]:
            return build(lambda site, *tensors: run(site, *tensors, lend=self.lend), bypass)

        return build_lent


@pytest.fixture
def rig() -> Behind:
    return Behind()


def test_an_original_whose_code_is_being_made_is_lent_nothing_after_the_call_that_left_it(rig: Behind) -> None:
    module = seeded(Block)
    lent = Lent(module)
    bound = rig.bind(module, lent.build)
    times = []
    for _ in range(3):
        with rig.expect(eager_calls=1):
            assert rig.call(bound, tokens()) == 0
        times.append(lent.times)
        rig.work()
    assert times == [1, 1, 1]
    rig.come()
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=1):
        assert rig.call(bound, tokens()) <= TOLERANCE
    with rig.expect(graph_calls=1, region_calls=1):
        assert rig.call(bound, tokens()) <= TOLERANCE
    assert lent.times == 3
    bound.weights_moved()
    with rig.expect(graph_calls=1, region_calls=1):
        assert rig.call(bound, tokens()) <= TOLERANCE


def test_a_call_that_waits_for_code_is_lent_the_weights_of_what_an_earlier_call_left(rig: Behind) -> None:
    module = seeded(Block)
    lent = Lent(module)
    bound = rig.bind(module, lent.build)
    rig.call(bound, tokens())
    rig.workers.at_once = True
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=1):
        assert rig.call(bound, tokens(), background_compile=False) <= TOLERANCE
    assert lent.times == 2


def test_a_block_whose_first_share_lacks_code_runs_whole_after_the_call_that_left_it(rig: Behind) -> None:
    module = seeded(Block)
    wholes = []

    def build(run: Any, bypass: Any) -> Sequence[Hook]:
        (hook,) = hooks_of(module)(run, bypass)
        site = replace(hook.sites[0], begins_block=True)

        def forward(x: torch.Tensor) -> Any:
            try:
                return run(site, x)
            except StillMissingError:
                wholes.append(x)
                return site.function(module, x)

        return [Hook(hook.module, forward, (site,))]

    bound, never = rig.bind(module, build), CallPolicy(may_capture=False)
    for policy, count in ((never, 0), (never, 0), (never, 1), (CallPolicy(), 1), (never, 2)):
        with rig.expect(eager_calls=1):
            assert rig.call(bound, tokens(), policy=policy) == 0
        assert len(wholes) == count  # not in the first two, since the first one queues code
        rig.work()
    rig.come()
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=1):
        assert rig.call(bound, tokens(), policy=never) <= TOLERANCE
    assert len(wholes) == 2


def test_a_site_that_another_pack_changed_is_lent_nothing(rig: Behind) -> None:
    module = seeded(Block)
    lent = Lent(module)
    bound = rig.bind(module, lent.build)
    inner = next(module.children())
    replaced = inner.forward
    inner.forward = lambda x: replaced(x)
    with rig.expect(eager_calls=1, bypasses={"replaced_forward": 1}):
        assert rig.call(bound, tokens()) == 0
    assert lent.times == 0
