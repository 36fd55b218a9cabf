"""Compile behind the picture: calls wait for nothing, and work on what they leave goes on beside them.

Between two calls, for a share of the time that they take, and in a thread while no prompt runs.
"""

from __future__ import annotations

import atexit
import threading

from ....config import CacheConfig
from ....keys import GraphKey
from ....regions.site import Progress, SilentProgress
from ....torch_facts.private_names import giving_way
from ...base import Call
from ..compile.tracing import import_all
from .compile_queue import CompileQueue
from .described_gpu import why_not

_SHARE = 0.05  # of the time of calls that may go to work in this process
_IDLE_SECONDS = 2.0  # without a call and without a prompt: then work goes on without credit
_LOOK_SECONDS = 0.05
_END_SECONDS = 10.0  # that the thread may take to end

# A call that ran originals alone: its key and weights epoch, and how much code had come until then.
Waited = tuple[GraphKey, int, int] | None


class CompilesBehind:
    """The queue's work beside calls, and the thread that goes on while nothing runs.

    lock: held while a call of a model runs, and while the queue works.
    """

    def __init__(self, queue: CompileQueue) -> None:
        self.queue, self._clock = queue, queue.clock
        queue.on_left = self._left
        self._calls, self._credit = 0, 0.0
        self._progress: Progress = SilentProgress()
        self._latest, self._looked, self._counted = 0.0, 0.0, 0.0  # the latter: credit was given until then
        self._thread: threading.Thread | None = None
        self._ending, self.lock = threading.Event(), threading.RLock()
        atexit.register(self._end)

    def coming(self, more: int) -> tuple[int, float]:
        """See `Backend.coming`. From any thread."""
        waiting = [each.call.region.label for each in list(self.queue.waiting.values())] + [""] * more
        share = _SHARE if self._progress.prompt_runs() else 1.0
        return self.queue.left, self.queue.coming.seconds(waiting, self.queue.held.count, share, self._clock())

    def _left(self) -> None:
        self._latest = self._counted = self._clock()
        if self._thread is None:
            self._thread = threading.Thread(target=self._go_on, name="resolute-behind", daemon=True)
            self._thread.start()

    def serves(self, call: Call, config: CacheConfig) -> bool:
        """Say if it compiles what a call lacks. If not, the call waits: for example where one processor is all."""
        self.queue.begin(config)
        if not call.is_behind or config.verify or self.queue.is_unable:
            return False
        return not why_not(call.tensors[0].device) and self.queue.held.plan(config.workers)

    def has_nothing_for(self, call: Call, latest: Waited) -> bool:
        """No code came since the module's latest call, which was such a one: it may run without any hook."""
        is_same = latest == (call.key, call.epoch, self.queue.changes)
        return is_same and call.is_behind and bool(self.queue.left)

    def advance(self, call: Call, ran_compiled: bool) -> Waited:
        """A call that waits for code has ended: work for as long as there is credit."""
        waited = None if ran_compiled else (call.key, call.epoch, self.queue.changes)
        self._progress = call.progress
        with self.queue.stats.stalling():
            self._work()
        return waited

    def _work(self) -> None:
        now = self._clock()
        earned = _SHARE * max(now - self._counted, 0.0)
        self._credit = min(self._credit + earned, self.queue.trace_seconds)  # no prompt pays for two at once
        while self._credit >= (self.queue.trace_seconds if self.queue.waiting else 0.0) and self.queue.do_one():
            self._credit -= self._clock() - now
            now = self._clock()
        self._latest = self._counted = self._clock()

    def _go_on(self) -> None:
        """The life of the thread."""
        while not self._ending.wait(_LOOK_SECONDS):
            if not self._is_idle():
                continue
            with giving_way():  # to a prompt that begins meanwhile
                import_all()  # without the lock
                self._counted = self._clock()  # calls did not take this time
                if self.lock.acquire(blocking=False):
                    try:
                        if self.queue.left:
                            self.queue.do_one()
                        else:
                            self._thread = None
                            self.queue.held.let_go()
                            return
                    finally:
                        self.lock.release()

    def _is_idle(self) -> bool:
        """For a while no prompt ran, and no call was made, through regions, by a replay or eagerly."""
        counters = self.queue.stats.counters
        calls = counters.graph_calls + counters.replays + counters.eager_calls
        if calls != self._calls or self._progress.prompt_runs():  # queued prompts follow each other at once
            self._calls, self._looked = calls, self._clock()  # not `_latest`: the next call would get no credit
            return False
        return self._clock() - max(self._latest, self._looked) >= _IDLE_SECONDS

    def _end(self) -> None:
        """Python ends: a thread that still traces would crash in it, and workers would go on with what they do."""
        self._ending.set()
        thread = self._thread
        if thread is not None:
            thread.join(_END_SECONDS)
        self.queue.workers.close()
