"""Allocations that fail, and CUDA graphs on the CPU that record and repeat operations."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class OutOfMemoryAt(TorchDispatchMode):
    """Meanwhile the n-th allocation raises what torch's allocator raises; the others succeed.

    An allocation is an operation on real tensors whose result is no view, or a call of `allocate`. Memory that compiled
    code takes inside is not counted.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.count = 0

    def allocate(self, what: object) -> None:
        """Count one allocation."""
        self.count += 1
        if self.count == self.number:
            raise torch.OutOfMemoryError(f"allocation {self.number}: {what}")

    @property
    def failed(self) -> bool:
        """Whether there were that many."""
        return self.count >= self.number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        given = pytree.tree_leaves((args, kwargs))
        traced = any(isinstance(leaf, FakeTensor) or leaf.is_meta for leaf in (*given, *made) if _is_tensor(leaf))
        if not traced and made and _has_new_memory(func, made, [leaf for leaf in given if _is_tensor(leaf)]):
            self.allocate(func)
        return result


def _has_new_memory(func: Any, made: list[torch.Tensor], given: list[Any]) -> bool:
    """Whether a result has memory of its own. Not every operation that returns a view says so (`view.dtype`)."""
    try:
        known = {leaf.untyped_storage().data_ptr() for leaf in given}
        return any(leaf.untyped_storage().data_ptr() not in known for leaf in made)
    except RuntimeError:  # a tensor of a trace, whose storage has no address
        return not func.is_view and any(each is not leaf for each in made for leaf in given or [None])


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result


class Graph:
    """`torch.cuda.CUDAGraph` on the CPU: a replay repeats the recorded operations in the memory of their results."""

    failing: OutOfMemoryAt | None = None  # its owner sets it while launches may fail
    is_recording = 0

    def __init__(self) -> None:
        self._recording = _Recording()
        self._is_open = False

    def capture_begin(self, **options: Any) -> None:
        self._allocate("cudaStreamBeginCapture")
        self._recording.__enter__()
        self._is_open = True
        Graph.is_recording += 1

    def capture_end(self) -> None:
        if not self._is_open:
            raise RuntimeError("no capture is open")
        self._is_open = False
        Graph.is_recording -= 1
        self._recording.__exit__(None, None, None)
        self._allocate("cudaGraphInstantiate")

    def replay(self) -> None:
        self._allocate("cudaGraphLaunch")
        with _disable_current_modes():
            for func, args, kwargs, result in self._recording.operations:
                again = func(*args, **kwargs)
                if isinstance(result, torch.Tensor) and again is not result:
                    result.copy_(again)

    def reset(self) -> None:
        self._recording.operations.clear()

    def pool(self) -> int:
        return 0

    def _allocate(self, what: str) -> None:
        if Graph.failing is not None:
            Graph.failing.allocate(what)


class TorchWithoutCuda:
    """The module `torch` with the parts of `torch.cuda` that a capture uses, on the CPU."""

    class cuda:
        CUDAGraph = Graph

        @staticmethod
        def Stream(device: Any) -> Any:
            return SimpleNamespace(wait_stream=lambda other: None)

        @staticmethod
        def current_stream(device: Any) -> Any:
            return SimpleNamespace(wait_stream=lambda other: None)

        @staticmethod
        def stream(stream: Any) -> Any:
            return contextlib.nullcontext()

        @staticmethod
        def synchronize(device: Any) -> None: ...

        @staticmethod
        def mem_get_info(device: Any) -> tuple[int, int]:
            return 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*shape: int, device: Any = None) -> torch.Tensor:
        return torch.zeros(*shape)
