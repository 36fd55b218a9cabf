"""A capture that CUDA broke ends for torch's allocator and for its random numbers too."""

from __future__ import annotations

import logging
import weakref
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
        self.made: list[Any] = []  # references to tensors of the capture
        self.left: list[Any] = []  # those tensors that were there when it ended

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
        self.torch.left = [made() for made in self.torch.made if made() is not None]
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


def test_a_full_card_takes_neither_a_cancel_nor_the_cause_away(
    state: Torch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*given: Any, **more: Any) -> None:
        raise torch.OutOfMemoryError("the card is full")

    monkeypatch.setattr(broken.torch, "zeros", full)
    state.breaks = 1
    with pytest.raises(Stopped):
        record(Stopped())
    state.breaks = 1
    with pytest.raises(CaptureError, match="not permitted"):
        record(RuntimeError("not permitted"))
    assert "restart ComfyUI if random numbers on the GPU fail" in caplog.text


@pytest.mark.parametrize("is_cause", [False, True], ids=["in a handler", "from another"])
def test_a_cancel_in_place_of_another_error_leaves_no_tensor_of_the_capture(state: Torch, is_cause: bool) -> None:
    """A kernel raises, and the one that takes its place is cancelled: the first error's frames hold tensors too."""

    def kernel() -> None:
        x = torch.ones(2)
        state.made.append(weakref.ref(x))
        raise ValueError(x.shape)

    def invoke(tensors: Any) -> Any:
        failed = None
        try:
            kernel()
        except ValueError as error:
            if not is_cause:
                raise Stopped from None
            failed = error
        raise Stopped from failed

    with pytest.raises(Stopped):
        capturing._capture_on_current_stream(invoke, [torch.ones(2)], [torch.zeros(2)], POOL)
    assert len(state.made) == 1
    assert state.left == []
