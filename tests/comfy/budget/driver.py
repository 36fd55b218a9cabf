"""comfy-aimdo's own classes over a driver that maps every page and keeps no memory."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

PAGE = 32 << 20
_START = 1 << 40  # of the first reservation; the next one begins as far behind it


class Driver:
    """The functions of comfy-aimdo's library that its Python classes call."""

    def __init__(self) -> None:
        self._reservations: dict[int, tuple[int, set[int]]] = {}  # by address: bytes, and the pages that are mapped
        self._buffers = 0

    # --- reservations ------------------------------------------------------------------------------------------

    def get_devctx(self, device: int) -> int:
        return device + 1

    def vbar_allocate(self, context: int, size: int, device: int) -> int:
        start = _START * (len(self._reservations) + 1)
        self._reservations[start] = size, set()
        return start

    def vbar_get(self, context: int, start: int) -> int:
        return start

    def vbar_fault(self, context: int, start: int, offset: int, size: int, signature: Any) -> int:
        pages = range(offset // PAGE, -(-(offset + size) // PAGE))
        self._reservations[start][1].update(pages)
        signature[: len(pages)] = [1] * len(pages)
        return 0

    def vbar_unpin(self, *_: int) -> None: ...
    def vbar_prioritize(self, *_: int) -> None: ...
    def vbar_free(self, *_: int) -> None: ...

    def vbar_free_memory(self, context: int, start: int, size: int) -> int:
        return 0

    def vbar_loaded_size(self, context: int, start: int) -> int:
        return PAGE * len(self._reservations[start][1])

    def vbar_get_nr_pages(self, context: int, start: int) -> int:
        return max(self._reservations[start][1], default=-1) + 1

    def vbar_get_residency(self, context: int, start: int, flags: Any, count: int) -> None:
        for page in self._reservations[start][1]:
            flags[page] = 1

    # --- pinned memory of the host -----------------------------------------------------------------------------

    def hostbuf_allocate(self, *_: Any) -> int:
        self._buffers += 1
        return self._buffers

    def hostbuf_free(self, *_: Any) -> None: ...

    def hostbuf_extend(self, buffer: int, size: int, reallocate: bool, register: bool, grown: Any) -> int:
        grown._obj.value = size
        return 1

    def hostbuf_truncate(self, *_: Any) -> bool:
        return True


class Stream:
    """A stream, and the buffer of core's on it."""

    def wait_stream(self, other: Any) -> None: ...

    def as_context(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def size(self) -> int:
        return 1 << 40

    def get(self, size: int, offset: int) -> tuple[None, int, int]:
        return None, offset, size


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Inside, DynamicVRAM of this ComfyUI runs on the CPU. The tensors that it makes have no contents."""
    driver, stream = Driver(), Stream()
    aimdo = {name: importlib.import_module(f"comfy_aimdo.{name}") for name in ("control", "model_vbar", "host_buffer")}
    torchs = importlib.import_module("comfy_aimdo.torch")
    core = importlib.import_module("comfy.model_management")
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)

    def without_contents(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device="meta")

    exchanged = [
        *((module, "lib", driver) for module in aimdo.values()),
        (torchs, "aimdo_to_tensor", lambda allocation, device: without_contents(allocation[2])),
        (torchs, "hostbuf_to_tensor", lambda buffer: without_contents(buffer.size)),
        (torch.cuda, "cudart", lambda: runtime),
        (core, "MAX_PINNED_MEMORY", 1 << 50),
        (core.args, "high_ram", True),
        (core, "get_offload_stream", lambda device: stream),
        (core, "current_stream", lambda device: stream),
        (core, "sync_stream", lambda device, other: None),
        (core, "get_aimdo_cast_buffer", lambda other, device: stream),
    ]
    with contextlib.ExitStack() as held:
        for where, name, value in exchanged:
            held.enter_context(mock.patch.object(where, name, value))
        yield
