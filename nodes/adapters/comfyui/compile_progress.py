"""Progress of compiling and loading: a text that ticks, ComfyUI's bar on the node, and an answer to Cancel at once.

In this process a region can take half a minute, and nothing in it can be interrupted. So a thread shows the seconds,
and says what happens as soon as the user presses Cancel.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import comfy.model_management
import comfy.utils
from comfy_execution.progress import get_progress_state

from .messages import broadcast
from .progress import NodeProgress

logger = logging.getLogger(__name__)

_TICK = 0.2  # seconds between two looks at the clock and at Cancel
_QUIET = 0.5  # seconds of loading before a text says so: most loads are faster

# Regions of each compile node: how many are compiled, and of how many. The nodes of one prompt count together.
_counts: dict[str, tuple[int, int]] = {}


class CompileProgress(NodeProgress):
    """Shows on one compile node what is compiled or loaded. `finish` ends that, and costs nothing if there was none."""

    def __init__(self, node_id: str | None) -> None:
        super().__init__(node_id)
        self._ticker: _Ticker | None = None
        self._bar: comfy.utils.ProgressBar | None = None

    def set_total(self, regions: int) -> None:
        """The node's model has so many regions to compile. The bar of the other nodes counts them too."""
        if self.node_id is not None:
            _counts[self.node_id] = (0, regions)

    def report(self, done: int, total: int, text: str) -> None:
        """`done` of this node's `total` regions are compiled, and the next one begins."""
        logger.info("Resolute: %s", text)
        if self.node_id is not None:
            _counts[self.node_id] = (done, total)
        done, total = _together(done, total)
        if self._ticker is None or self._ticker.is_loading:
            self._stop()
            self._ticker = _Ticker(self.show, self._compiling, delay=0.0)
        self._ticker.set(done, total)
        if self.node_id is not None:
            self._bar = self._bar or comfy.utils.ProgressBar(total, node_id=self.node_id)
            self._bar.update_absolute(done, total)

    def loading(self, regions: int) -> None:
        """Regions are being loaded from disk; 0 while the backend itself is loaded."""
        if self._ticker is None:
            self._ticker = _Ticker(self.show, _loading, delay=_QUIET, is_loading=True)
        self._ticker.set(0, regions)

    def finish(self) -> None:
        """The call is answered, or failed."""
        if self._ticker is not None:
            self._stop()
            broadcast("idle")
        if self._bar is not None:
            self._bar = None
            get_progress_state().finish_progress(str(self.node_id))

    def _stop(self) -> None:
        ticker, self._ticker = self._ticker, None
        if ticker is not None:
            ticker.stop()

    @staticmethod
    def _compiling(done: int, total: int, seconds: float) -> str:
        if comfy.model_management.processing_interrupted():
            return f"stopping; {done} of {total} are kept"
        return f"compiling {min(done + 1, total)} of {total}, {seconds:.0f} s"


class _Ticker:
    """Shows a text again each time that it changed, until `stop`. describe: (done, total, seconds) -> the text."""

    def __init__(
        self,
        show: Callable[[str], None],
        describe: Callable[[int, int, float], str],
        delay: float,
        is_loading: bool = False,
    ) -> None:
        self.is_loading = is_loading
        self._show, self._describe, self._delay = show, describe, delay
        self._state = (0, 0)
        self._shown = ""
        self._started = time.perf_counter()
        self._changed, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="resolute-progress", daemon=True)
        self._thread.start()

    def set(self, done: int, total: int) -> None:
        self._state = (done, total)
        if not self._delay:
            self._update()  # at once: the next region may be compiled before the thread looks again

    def stop(self) -> None:
        self._ended = True
        self._changed.set()
        self._thread.join()  # so that no text follows the result of the call

    def _run(self) -> None:
        self._changed.wait(self._delay or _TICK)
        while not self._ended:
            self._update()
            self._changed.wait(_TICK)

    def _update(self) -> None:
        text = self._describe(*self._state, time.perf_counter() - self._started)
        if text != self._shown:
            self._shown = text
            self._show(text)
            broadcast("working", text=text, done=self._state[0], total=self._state[1])


def _loading(done: int, regions: int, seconds: float) -> str:
    what = f"{regions} compiled regions" if regions else "the backend"
    return f"loading {what}, {seconds:.0f} s"


def _together(done: int, total: int) -> tuple[int, int]:
    """The regions of all compile nodes of the running prompt: how many are compiled, and of how many."""
    running = get_progress_state().dynprompt.all_node_ids()
    counts = [count for node_id, count in list(_counts.items()) if node_id in running]
    return (sum(count[0] for count in counts), sum(count[1] for count in counts)) if counts else (done, total)
