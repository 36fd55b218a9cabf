"""What is left of a capture that CUDA broke: torch's allocator must hear of its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compile_cache.backends.cuda_graphs import capture as capturing
from compile_cache.errors import CaptureError

POOL = (7, 0)


class Graph:
    """A graph whose capture ends as CUDA ends one that waited for the GPU, unless it is whole."""

    whole = False

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None: ...

    def capture_end(self) -> None:
        if not self.whole:
            raise RuntimeError("operation failed due to a previous error during capture")


class Stopped(BaseException):
    """As ComfyUI's own, a cancel is no Exception."""


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The pools whose capture was ended for torch's allocator."""
    ended: list[Any] = []
    cuda = SimpleNamespace(CUDAGraph=Graph)
    monkeypatch.setattr(capturing, "torch", SimpleNamespace(cuda=cuda, Tensor=torch.Tensor))
    monkeypatch.setattr(capturing, "end_allocate_to_pool", lambda device, pool: ended.append((device, pool)))
    return ended


def record(error: BaseException | None = None) -> None:
    x = torch.ones(2)

    def invoke(tensors: Any) -> Any:
        if error is not None:
            raise error
        return [x]

    capturing._capture_on_current_stream(invoke, [x], [torch.zeros(2)], POOL)


def test_the_allocator_is_freed_of_a_capture_that_cuda_broke(ended: list[Any]) -> None:
    with pytest.raises(CaptureError, match="previous error"):
        record()
    assert [pool for _, pool in ended] == [POOL]


def test_also_where_the_forward_raises(ended: list[Any]) -> None:
    with pytest.raises(CaptureError, match="operation not permitted"):
        record(RuntimeError("operation not permitted"))
    assert [pool for _, pool in ended] == [POOL]


@pytest.mark.parametrize("error", [None, RuntimeError("1 / 0"), Stopped()], ids=["none", "python", "cancel"])
def test_a_whole_capture_ends_by_itself(
    ended: list[Any], monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    monkeypatch.setattr(Graph, "whole", True)
    if error is None:
        record()
    else:
        with pytest.raises((CaptureError, Stopped)):
            record(error)
    assert ended == []
