"""An input that is given away is freed within the region, and a result in memory of its own holds no larger one."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from compile_cache.backends.inductor.lower import tracing
from compile_cache.backends.inductor.lower.compiled_region import CompiledRegion
from compile_cache.modules.own_memory import own_memory
from compile_cache.modules.site import Hook, RegionSite

from ....rig import TOKENS, Rig, random, relative_error, seeded


class Carrying(nn.Module):
    """Convolves what it carried over and its input together, and carries its input over, as decoders of videos do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 6, 3)
        self.carried = random(2, 2, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _run(self, x, self.carried)[0]
        return result


def _run(module: Any, x: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.sigmoid() * 2
    y = module.conv(torch.cat([before, x], 1).transpose(1, 2)).transpose(1, 2)
    return y, own_memory(x)


class Caller:
    """Hooks that give away what was carried over, and note what became of it."""

    def __init__(self, module: Carrying) -> None:
        self.module, self.given, self.results = module, [], []  # type: ignore[var-annotated]

    def __call__(self, run: Any, bypass: Any) -> Sequence[Hook]:
        site = RegionSite("carrying", "Carrying", self.module, _run, (TOKENS, ("b", None, None)))

        def forward(x: torch.Tensor) -> torch.Tensor:
            before = self.module.carried.clone()
            self.given.append(weakref.ref(before))
            box = [before]
            del before
            result, carried = run(site, x, box)
            assert not box
            self.results.append(carried)
            found: torch.Tensor = result
            return found

        return [Hook(self.module, forward, (site,))]


@pytest.fixture
def module() -> Any:
    return seeded(Carrying)


def test_it_is_freed_and_the_result_is_right(cold: Rig, module: Carrying) -> None:
    caller = Caller(module)
    bound = cold.bind(module, caller)
    for count in (5, 9):
        x = random(2, count, 6)
        assert relative_error(bound(x), module(x)) < 1e-4
        assert caller.given[-1]() is None
        carried = caller.results[-1]
        assert carried.untyped_storage().nbytes() == carried.nbytes, "it keeps the padded input of the convolution"


def test_code_that_fails_without_it_makes_the_call_run_once_more(
    cold: Rig, module: Carrying, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = Caller(module)
    bound, x = cold.bind(module, caller), random(2, 5, 6)
    bound(x)

    def fail(self: Any, weights: Any, tensors: Any, donated: Any = ()) -> None:
        tensors.clear()
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(CompiledRegion, "__call__", fail)
    with cold.expect({"compile_failed": 1}, eager_calls=1):
        actual = bound(x)
    assert relative_error(actual, module(x)) == 0
    assert len(caller.given) == 3, "the first call, and the second one twice"


def test_one_frame_has_the_strides_of_its_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "region_format", lambda tensor, dims: torch.channels_last_3d)
    frame = random(1, 3, 4, 5).contiguous(memory_format=torch.channels_last).unsqueeze(2)
    odd = frame.as_strided(frame.shape, (7, 1, 1, 15, 3))
    expected = torch.empty(frame.shape).contiguous(memory_format=torch.channels_last_3d).stride()
    for given in (frame, odd, frame.contiguous(), random(2, 3, 2, 4, 5)):
        found = tracing.in_region_format(given, ("b", None, "t", "h", "w"))
        assert torch.equal(found, given)
        assert given.shape[0] > 1 or found.stride() == expected
    assert tracing.in_region_format(odd, ("b", None, "t", "h", "w")).data_ptr() == odd.data_ptr()
