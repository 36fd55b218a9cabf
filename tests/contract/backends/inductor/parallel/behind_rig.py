"""A rig whose calls wait for nothing, with workers whose jobs end when a test says so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.backends.inductor.parallel import job as jobs
from compile_cache.backends.inductor.parallel.behind import CompilesBehind
from compile_cache.backends.inductor.parallel.compile_queue import CompileQueue
from compile_cache.backends.inductor.parallel.failures import NotCompiledError
from compile_cache.backends.inductor.parallel.process import Compiled

from ....rig import Bound, Rig, relative_error


class Workers:
    """A pool whose jobs end when a test says so."""

    def __init__(self) -> None:
        self.jobs: list[tuple[jobs.Job, Compiled]] = []
        self.running, self.users, self.ended = True, 0, 0
        self.low = True  # those for a call that waits end a job as soon as it begins
        self.devices: list[torch.device] = []  # that children were started for

    @contextlib.contextmanager
    def in_use(self, count: int, device: torch.device, low: bool = False) -> Iterator[None]:
        self.low = low
        self.users += 1
        self.devices.append(device)
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
        if not self.low:
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
    """The rig's calls are answered at once. Its clock goes on with calls only."""

    def __init__(self, **config: Any) -> None:
        super().__init__(InductorBackend(), compile="behind", workers=2, **config)
        self.workers, self.now = Workers(), 100.0
        self.queue = CompileQueue(self.backend.table, self.workers, lambda: self.now)  # type: ignore[attr-defined, arg-type]
        self.behind = self.backend._behind = CompilesBehind(self.queue)  # type: ignore[attr-defined]

    def call(self, bound: Bound, *tensors: torch.Tensor, seconds: float = 100.0, **changes: Any) -> float:
        """The relative error of a call that takes so long by the rig's clock."""
        actual = self.answer(bound, *tensors, seconds=seconds, **changes)
        with torch.inference_mode():
            return relative_error(actual, bound.module(*tensors))

    def answer(self, bound: Bound, *tensors: torch.Tensor, seconds: float = 100.0, **changes: Any) -> Any:
        """The result of a call that takes so long by the rig's clock."""
        self.now += seconds
        return bound(*tensors, is_behind=True, **changes)

    def leave(self, bound: Bound, *tensors: torch.Tensor) -> None:
        """A first call leaves its regions, and a second one pays for their traces."""
        for _ in range(2):
            self.call(bound, *tensors)
