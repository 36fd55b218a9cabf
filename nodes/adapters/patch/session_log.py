"""Report each sampling run on the node, in the log and in the timeline: its work, its seconds and the reasons."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ....compile_cache.backends.eager import EagerBackend
from ....compile_cache.keys import Role
from ....compile_cache.telemetry import rows
from ....compile_cache.telemetry.run_summary import Run, merge, subtract
from ....compile_cache.telemetry.stats import SHORT_WAIT, Mark
from ..comfyui.compile_progress import CompileProgress
from ..comfyui.transformer_options import COND_ORDER, SCHEDULE
from ..process import runtime
from ..process.compile_request import CompileRequest
from ..report import runs, stock_measurements

logger = logging.getLogger(__name__)

# Logs of ControlNets whose calls belong to the sampling run that is under way. The compiled model's run ends them,
# since it knows the batch; where the model is not compiled, ComfyUI's cleanup of the ControlNet does.
_open: list[SessionLog] = []


class SessionLog:
    """Compares the cache's counters at the start and at the end of a sampling run."""

    def __init__(
        self, progress: CompileProgress, request: CompileRequest, facts: Callable[[], Mapping[str, Any]]
    ) -> None:
        """facts: returns the fields of a `Run` about the model; called when a run ends."""
        self._progress = progress
        self._role, self._label, self._cell = request.role, request.label, request.cell
        self._facts, self._file = facts, request.file
        self._why_eager = request.why if isinstance(request.backend, EagerBackend) else ""
        self._begun: Mark | None = None
        self._calls: list[dict[str, Any]] = []  # of a ControlNet: the counter changes of each
        self._started, self._clock = 0.0, 0.0
        self._shape: tuple[int, ...] = ()
        self._batch, self._steps = 1, 0

    def begin(self) -> None:
        self._begun, self._calls = runtime.cache().stats.mark(), []
        self._progress.begin_run()
        self._started, self._clock = time.time(), time.perf_counter()
        self._shape, self._batch, self._steps = (), 1, 0

    def begin_once(self) -> None:
        """For a ControlNet: its first call of a sampling run."""
        if self not in _open:
            _open.append(self)
            self.begin()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around a ControlNet's call: its counts and waits are not counted for the sampling run as well."""
        mark = runtime.cache().stats.mark()
        try:
            yield
        finally:
            self._calls.append(runtime.cache().stats.since(mark))

    def note_latent(self, latent: torch.Tensor | Sequence[torch.Tensor], options: Any) -> None:
        """Note a call's latent. The largest one of a run is the picture; smaller ones are areas of it, or tiles.

        Models of video and sound (LTX AV, MiniMax H3) take a list of both, the video first.
        """
        shape = (latent if isinstance(latent, torch.Tensor) else latent[0]).shape
        if self._shape and shape[-1] * shape[-2] <= self._shape[-1] * self._shape[-2]:
            return
        self._shape = tuple(shape)
        self._batch, self._steps = shape[0], 0
        with contextlib.suppress(Exception):  # another pack's values may not be lists
            merged = options.get(COND_ORDER) if isinstance(options, dict) else None  # several conds in one batch
            self._batch = shape[0] // len(merged) if merged and shape[0] % len(merged) == 0 else shape[0]
            sigmas = options.get(SCHEDULE) if isinstance(options, dict) else None
            self._steps = max(len(sigmas) - 1, 0) if sigmas is not None else 0

    def end(self, why_no_calls: str = "", is_logged: bool = True) -> None:
        """Log the summary and show it on the node. why_no_calls: the reason, if nothing ran compiled.

        is_logged: False for the many calls of a decode in tiles, which are logged only if one had to wait.
        """
        if self in _open:
            _open.remove(self)
        if self._begun is None:
            return
        run = self._run(self._changes(self._begun), why_no_calls)
        if is_logged or run.waited >= SHORT_WAIT:
            logger.info("Resolute: %s", rows.log_line(run))
        self._begun = None
        if self._shape or why_no_calls:
            measured = stock_measurements.of(run)
            self._progress.show_result(rows.status(run, measured.on_node() if measured is not None else None))
            runs.add(run)
        while self._role is not Role.CONTROLNET and _open:
            control = _open.pop()
            control._batch = self._batch  # a ControlNet's calls do not tell the number of conds in their batch
            control.end()

    def _changes(self, begun: Mark) -> dict[str, Any]:
        if self._role is Role.CONTROLNET:
            return merge(self._calls)
        changes = runtime.cache().stats.since(begun)
        return subtract(changes, merge([each for control in _open for each in control._calls]))

    def _run(self, changes: dict[str, Any], why_no_calls: str) -> Run:
        shape, is_warm_up = self._shape or (0, 0), runs.is_warm_up_prompt()
        return Run(
            model=self._label,
            role=self._role.value,
            width=shape[-1] * self._cell,
            height=shape[-2] * self._cell,
            batch=self._batch,
            steps=0 if is_warm_up else self._steps,  # it runs only a few steps of its schedule
            started=self._started,
            seconds=time.perf_counter() - self._clock,
            **changes,
            # Core ends a run in a `finally`, so the exception that stopped it is still being handled.
            stopped=isinstance(sys.exc_info()[1], self._progress.cancellations),
            came=self._progress.became_ready,
            why_no_calls=why_no_calls,
            cell=self._cell,
            file=self._file,
            is_warm_up=is_warm_up,
            why_eager=self._why_eager,
            on_cpu=runtime.device().type == "cpu",
            **self._facts(),
        )
