"""A rig whose calls wait for nothing, with workers whose jobs end when a test says so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from compile_cache.backends.base import Code
from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.backends.inductor.compiler import job as jobs
from compile_cache.backends.inductor.compiler.background import BackgroundCompiler
from compile_cache.backends.inductor.compiler.compile_queue import CompileQueue
from compile_cache.backends.inductor.compiler.failures import NotCompiledError
from compile_cache.backends.inductor.compiler.process import Compiled

from ....rig import Attention, Bound, Rig, relative_error


class Workers:
    """A pool whose jobs end when a test says so, or with `at_once` as soon as they begin."""

    def __init__(self) -> None:
        self.jobs: list[tuple[jobs.Job, Compiled]] = []
        self.running, self.at_once, self.users, self.ended = True, False, 0, 0
        self.started: list[tuple[int, torch.device]] = []

    @contextlib.contextmanager
    def in_use(self, count: int, device: torch.device) -> Iterator[None]:
        self.users += 1
        self.started.append((count, device))
        yield
        self.users -= 1

    def close(self) -> None:
        self.ended += 1
        while self.jobs:
            self.finish(NotCompiledError("the processes that compile were ended"))

    def submit(self, job: jobs.Job) -> Compiled:
        if not self.running:
            raise NotCompiledError("no process")
        result = Compiled()
        self.jobs.append((job, result))
        if self.at_once:
            self.finish()
        return result

    def finish(self, error: Exception | None = None) -> jobs.Job:
        """The oldest job ends, with an artifact or with an error."""
        job, result = self.jobs.pop(0)
        if error is None:
            result.set_result((jobs._run(job), 1.0))
        else:
            result.set_exception(error)
        return job


class Behind(Rig):
    """The rig's calls are answered at once. No thread works on what they leave: `work` does. `now` is its clock."""

    def __init__(self, **config: Any) -> None:
        super().__init__(InductorBackend(), **{"compile": "behind", "workers": 2, **config})
        self.workers, self.now = Workers(), 100.0
        self.queue = CompileQueue(self.backend.table, self.workers, lambda: self.now)  # type: ignore[attr-defined, arg-type]
        self.background = self.backend._background = BackgroundCompiler(self.queue)  # type: ignore[attr-defined]
        self.queue.on_left = lambda: None

    def call(self, bound: Bound, *tensors: torch.Tensor, **changes: Any) -> float:
        """The relative error of a call."""
        actual = bound(*tensors, **{"background_compile": True, **changes})
        with torch.inference_mode():
            return relative_error(actual, bound.module(*tensors))

    def work(self, compile_local: bool = False) -> None:
        """Do all that can be done now. compile_local: no prompt runs."""
        while self.queue.work.step(compile_local):
            pass

    def leave(self, bound: Bound, *tensors: torch.Tensor) -> None:
        """A call leaves its regions, and workers get them."""
        self.call(bound, *tensors)
        self.work()

    def come(self) -> None:
        """All code comes."""
        self.work()
        while self.workers.jobs:
            self.workers.finish()
            self.work()


class Chain(nn.Module):
    """Regions of so many kinds, each of which runs twice."""

    def __init__(self, kinds: int) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(Attention(16, eps=10.0**-each) for each in range(1, kinds + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for attention in self.attentions:
            x = attention(attention(x, x), x)
        return x


def code_of(bound: Bound) -> Code:
    """Of the regions of the only call that the module had."""
    (key,) = [key for key, missing in bound.program._missing.items() if missing] or [None]  # type: ignore[attr-defined]
    return bound.program.code_of(key)
