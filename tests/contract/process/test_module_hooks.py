"""A module's hooks are built once, for the node's count and for the calls, and again after its code changed."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

ROLE = "unet"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = 2, nn.Linear(2, 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])


class Built:
    """The hooks of one model, and how often they were built."""

    def __init__(self, adapter: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, *left_out: str) -> None:
        self.model, self.times, self.reported = Model(), 0, list[str]()
        self.reason: str | None = "a reason"
        part = adapter("process.module_hooks")
        monkeypatch.setattr(part, "hooks_of", self.hooks_of)
        self.weights = adapter("module_state.module_state").ModuleState(self.model)
        self.hooks = part.ModuleHooks(self.model, ROLE, left_out, self.weights)
        self._hook, self._site = part.Hook, part.RegionSite
        self._reason = part.BypassReason

    def hooks_of(self, module: Any, role: str, run: Any, bypass: Any) -> list[Any]:
        assert (module is self.model, role) == (True, ROLE)
        self.times += 1
        if self.reason is not None:
            bypass(self._reason("code", self.reason))
        sites = [self._site(f"blocks.{n}", "Block", block, None, ()) for n, block in enumerate(module.blocks)]
        return [
            self._hook(
                site.module, lambda x, site=site: (bypass(self._reason("code", "of a call")), run(site, x))[1], (site,)
            )
            for site in sites
        ]

    def surveyed(self, run: Any = None) -> Any:
        """As the program asks at a new weights epoch."""
        self.reported.clear()
        self.weights.refresh(inspect_modules=True)
        return self.hooks(run, lambda reason: self.reported.append(reason.detail))


@pytest.fixture
def built(adapter: Callable[[str], ModuleType], comfy: None, monkeypatch: pytest.MonkeyPatch) -> Built:
    return Built(adapter, monkeypatch)


def test_the_count_of_a_node_and_the_calls_share_one_build(built: Built) -> None:
    before = built.hooks.known()
    assert list(built.surveyed()) == list(before)
    assert built.reported == ["a reason"]  # each call says why a block has no hook, though none was built for it
    assert built.times == 1


def test_weights_that_move_or_change_build_nothing(built: Built) -> None:
    built.surveyed()
    epoch = built.weights.epoch
    for weight in built.model.parameters():
        weight.data = weight.data + 1
    built.surveyed()
    assert (built.weights.epoch > epoch, built.times) == (True, 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.blocks.append(Block()),
        lambda model: setattr(model.blocks[1], "inner", nn.Linear(2, 2)),
        lambda model: setattr(model.blocks[1], "scale", 3),
        lambda model: setattr(model.blocks[1].inner, "weight", nn.Parameter(torch.zeros(2, 2, dtype=torch.float16))),
        lambda model: setattr(model.blocks[1], "forward", lambda x: x),
        lambda model: model.blocks[1].register_forward_hook(lambda *_: None),
    ],
    ids=["block added", "part exchanged", "setting", "dtype", "forward replaced", "torch hook"],
)
def test_a_model_that_changed_gets_its_hooks_anew(built: Built, change: Callable[[Any], object]) -> None:
    built.surveyed()
    change(built.model)
    assert len(built.surveyed()) == len(built.model.blocks)
    assert built.times == 2


def test_kept_hooks_run_through_the_program_that_asked_last(built: Built) -> None:
    first, *_ = built.surveyed(run=lambda site, x: x)
    assert built.surveyed(run=lambda site, x: x * 2)[0] is first
    assert first.forward(3) == 6
    assert built.reported == ["a reason", "of a call"]


def test_a_name_that_is_left_out_is_checked_against_the_same_hooks(
    adapter: Callable[[str], ModuleType], comfy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = Built(adapter, monkeypatch, "blocks.1")
    assert [hook.sites[0].name for hook in built.hooks.known()] == ["blocks.0"]
    assert len(built.surveyed()) == 1
    assert built.reported == ["a reason", "you left out blocks.1: 1 of 2 blocks run eagerly"]
    assert built.times == 1
    unknown = Built(adapter, monkeypatch, "blocks.7")
    unknown.reason = None
    with pytest.raises(Exception, match="which this model does not have"):
        unknown.hooks.known()


def test_a_name_that_may_be_of_blocks_without_a_hook_does_not_cost_the_picture(
    adapter: Callable[[str], ModuleType],
    comfy: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    built = Built(adapter, monkeypatch, "BasicTransformerBlock", "blocks.1")
    built.reason = "attention cannot be traced"
    with caplog.at_level("INFO"):
        assert [hook.sites[0].name for hook in built.hooks.known()] == ["blocks.0"]
    assert "'BasicTransformerBlock', which no block has that is compiled now: attention cannot be traced" in caplog.text
