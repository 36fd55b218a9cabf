"""A capture that CUDA broke ends for torch's allocator and for its random numbers too."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compile_cache.backends.cuda_graphs import broken
from compile_cache.backends.cuda_graphs import capture as capturing
from compile_cache.backends.cuda_graphs.pools import Pools
from compile_cache.errors import CaptureError

POOL = (7, 0)


class Torch:
    """Torch's state of captures. `breaks`: how many of the next captures CUDA breaks."""

    def __init__(self) -> None:
        self.breaks = 0
        self.ended: list[Any] = []  # pools whose capture was ended for the allocator
        self.released: list[Any] = []  # pools that it was told the graph no longer uses
        self.begun: list[Any] = []  # the pool of each capture
        self.is_allocating = self.counts_as_recorded = False

    def end_allocate_to_pool(self, device: int, pool: Any) -> None:
        self.ended.append((device, pool))
        self.is_allocating = False

    def release_pool(self, device: int, pool: Any) -> None:
        self.released.append(pool)


class Graph:
    """A graph whose capture ends as torch 2.11 ends one: if CUDA broke it, torch does not hear of the end."""

    def __init__(self, torch: Torch) -> None:
        self.torch, self.is_broken = torch, False

    def capture_begin(self, capture_error_mode: str, pool: Any = None) -> None:
        assert capture_error_mode == "thread_local"
        assert not self.torch.is_allocating, "only one capture at a time"
        self.torch.begun.append(pool)
        self.is_broken = self.torch.breaks > 0
        self.torch.breaks -= self.is_broken
        self.torch.is_allocating = self.torch.counts_as_recorded = True

    def capture_end(self) -> None:
        if self.is_broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.torch.is_allocating = self.torch.counts_as_recorded = False

    def reset(self) -> None: ...


class Stopped(BaseException):
    """As ComfyUI's own, a cancel is no Exception."""


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Torch:
    state = Torch()
    fake = SimpleNamespace(
        cuda=SimpleNamespace(CUDAGraph=lambda: Graph(state)), Tensor=torch.Tensor,
        zeros=lambda size, device: torch.zeros(size),
    )  # fmt: skip
    for module in (capturing, broken):
        monkeypatch.setattr(module, "torch", fake)
    monkeypatch.setattr(broken, "end_allocate_to_pool", state.end_allocate_to_pool)
    monkeypatch.setattr(broken, "release_pool", state.release_pool)
    monkeypatch.setattr(broken.pools, "shared", Pools())
    return state


def record(error: BaseException | None = None) -> None:
    x = torch.ones(2)

    def invoke(tensors: Any) -> Any:
        if error is not None:
            raise error
        return [x]

    capturing._capture_on_current_stream(invoke, [x], [torch.zeros(2)], POOL)


@pytest.mark.parametrize(
    ("error", "told"), [(None, "previous error"), (RuntimeError("not permitted"), "not permitted")]
)
def test_torch_hears_of_the_end_of_a_capture_that_cuda_broke(state: Torch, error: Any, told: str) -> None:
    state.breaks = 1
    with pytest.raises(CaptureError, match=told):
        record(error)
    assert [pool for _, pool in state.ended] == state.released == [POOL]
    assert not state.is_allocating
    assert not state.counts_as_recorded  # else the next random number on the GPU raises
    assert state.begun == [POOL, None]
    record()


def test_it_warns_if_random_numbers_stay_recorded(state: Torch, caplog: pytest.LogCaptureFixture) -> None:
    state.breaks = 2
    with caplog.at_level(logging.WARNING), pytest.raises(CaptureError):
        record()
    assert "restart ComfyUI if random numbers on the GPU fail" in caplog.text


@pytest.mark.parametrize("error", [None, RuntimeError("1 / 0"), Stopped()], ids=["none", "python", "cancel"])
def test_a_whole_capture_ends_by_itself(state: Torch, error: BaseException | None) -> None:
    if error is None:
        record()
    else:
        with pytest.raises((CaptureError, Stopped)):
            record(error)
    assert state.ended == state.released == []
    assert state.begun == [POOL]
