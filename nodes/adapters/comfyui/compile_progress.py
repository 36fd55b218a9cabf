"""Progress of compiling and loading: a text with seconds, ComfyUI's bar on the node, and immediate feedback on Cancel.

Compiling a region in this process can take half a minute and cannot be interrupted. So a thread shows the seconds, and
says what Cancel will do as soon as the user presses it.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence

import comfy.model_management
import comfy.utils
from comfy_execution.progress import get_progress_state

from ....compile_cache.telemetry.run_summary import NOW_COMPILED
from ....compile_cache.texts import Text, words_of
from . import background_progress
from .background_progress import compile_eta, rounded
from .messages import broadcast, prompt_runs, running_workflow, show_on_node

logger = logging.getLogger(__name__)

_TICK = 0.2  # seconds between two checks of the clock and of Cancel
_LONG = 1.0  # seconds; a shorter call shows no bar
_QUIET = 1.0  # seconds of loading before its text appears, and seconds without waiting before the text goes away

_results: dict[str, dict[str, str]] = {}  # the latest result text by compile node and activity
_logged = (0, 0)  # the latest count in the log
_clock: tuple[str | None, float] = None, 0.0  # the prompt whose waits are shown, and the seconds waited before it


class CompileProgress:
    """Shows compiling and loading on one compile node, and raises ComfyUI's Cancel between two units of work. `finish`
    ends the display, and costs nothing if there was none. Without a server (in tests) it only logs.

    doing: the node's activity when nothing is compiled: "sampling". waiting: returns the seconds that prompts waited so
    far, a clock that stops while no prompt waits: `Stats.waiting_seconds`.
    """

    cancellations: tuple[type[BaseException], ...] = (comfy.model_management.InterruptProcessingException,)

    def __init__(self, node_id: str | None, doing: str, waiting: Callable[[], float]) -> None:
        self.node_id = node_id
        self._doing, self._waiting = doing, waiting
        self._count = (0, 0)
        self._loads_since: float | None = None  # the clock at the start of loading; None while regions are compiled
        self._waited, self._moved = 0.0, 0.0  # the last value of the clock, and the time at which it changed
        self._shown = "", 0
        self._ticker: _Ticker | None = None
        self._bar: comfy.utils.ProgressBar | None = None
        self.of_call: CallBar | None = None  # set while a call runs that may take long
        self._part = node_id, doing
        self.is_waiting = self._part in background_progress.unfinished
        self.became_ready = False  # True if all regions became ready in this run

    @property
    def count(self) -> tuple[int, int]:
        """(ready, total) regions of all compile nodes of the prompt, as the node shows them."""
        counts = list(background_progress.running_counts().values()) or [self._count]
        return sum(ready for ready, _ in counts), sum(total for _, total in counts)

    def show_result(self, text: str) -> None:
        """Show the result of a run beside those of the node's other parts: a loader compiles a model and a VAE."""
        background_progress.run_ends(self._part)
        self._show(text)

    def _show(self, text: str, workflow: str | None = None) -> None:
        if self.node_id is None:
            return
        results = _results.setdefault(self.node_id, {})
        results[self._doing] = text
        show_on_node(Text.joined("\n", results.values()), self.node_id, workflow)

    def set_total(self, ready: int, regions: int) -> None:
        """The node runs, and `ready` of its `regions` are ready. Other nodes' bars count them too."""
        _results.pop(str(self.node_id), None)
        self.note_count(ready, regions)

    def note_count(self, ready: int, regions: int) -> None:
        """Record that `ready` of the node's `regions` are ready."""
        self._count = (ready, regions)
        if self.node_id is not None:
            background_progress.counts[self._part] = self._count

    def begin_run(self) -> None:
        """A sampling run or a decode begins. Seconds count from the first one of the prompt."""
        global _clock
        self.became_ready = False
        if _clock[0] != (prompt := get_progress_state().prompt_id):
            _clock = prompt, self._waiting()

    def note_waiting_call(self, gain: Callable[[], float | None] | None = None) -> None:
        """A call ran original blocks while their code is being compiled. gain: see
        `background_progress.note_waiting_call`.
        """
        self.is_waiting, self.became_ready = True, False
        workflow = running_workflow()
        background_progress.note_waiting_call(self._part, gain, lambda text: self._show(text, workflow))

    def note_all_compiled(self) -> None:
        """A call ran all its regions compiled, after calls that waited."""
        self.is_waiting, self.became_ready = False, True
        background_progress.note_all_compiled(self._part)
        show_on_node(NOW_COMPILED, self.node_id)

    def raise_if_cancelled(self) -> None:
        """Raise ComfyUI's own interruption if the user pressed Cancel."""
        comfy.model_management.throw_exception_if_processing_interrupted()

    def begin_block(self) -> None:
        """Called before each block of a call. Raises on Cancel, like ComfyUI's operations, which a region lacks."""
        self.raise_if_cancelled()
        if self.of_call is not None:
            self.of_call.advance()

    prompt_runs = staticmethod(prompt_runs)

    def cancel_again(self) -> None:
        """Cancel the running prompt again. ComfyUI's operations raise a Cancel once, possibly in a tracing thread."""
        if prompt_runs():
            comfy.model_management.interrupt_current_processing()

    def report(self, done: int, total: int) -> None:
        """`done` of this node's `total` regions are ready. Called before the first compile, and after each."""
        global _logged
        self.note_count(done, total)
        if self.count != _logged:
            _logged = self.count
            logger.info("Resolute: %d of %d regions are compiled", *_logged)
        if self._ticker is None or self._loads_since is not None:
            self._stop()
            self._loads_since = None
            self._ticker = _Ticker(self._tick)
        self._tick()  # at once: the next region may be ready before the thread's next tick
        if self.node_id is not None:
            done, total = self.count
            self._bar = self._bar or comfy.utils.ProgressBar(total, node_id=self.node_id)
            self._bar.update_absolute(done, total)

    def loading(self) -> None:
        """The backend begins to load, and then regions from disk."""
        self._loads_since = self._waiting()
        self._ticker = self._ticker or _Ticker(self._tick, delay=_QUIET)

    def finish(self) -> None:
        """The call returned or failed: end the display."""
        if self._ticker is not None:
            self._stop()
            if self._loads_since is None:
                stopped = isinstance(sys.exc_info()[1], self.cancellations)  # being handled by the caller
                show_on_node(Text("stopped") if stopped else self._doing, self.node_id)
                if stopped:
                    background_progress.ensure_ticker()
            broadcast("idle")
        if self._bar is not None:
            self._bar = None
            get_progress_state().finish_progress(str(self.node_id))

    def _stop(self) -> None:
        ticker, self._ticker = self._ticker, None
        if ticker is not None:
            ticker.stop()
        self._shown = "", 0

    def _tick(self) -> None:
        """Show the text if it changed; while the clock stands still, show the node's activity."""
        done, total = self.count if self._loads_since is None else (0, 0)
        waited, now = self._waiting(), time.monotonic()
        if waited != self._waited:
            self._waited, self._moved = waited, now
        if self._loads_since is not None and waited - self._loads_since < _QUIET:
            return
        if now - self._moved > _QUIET:
            if self._shown[0]:
                self._shown = "", 0
                show_on_node(self._doing, self.node_id)
                broadcast("idle")
            return
        seconds = waited - _clock[1]
        text = self._text(done, total, seconds) if total else Text("loading, {seconds} s", seconds=round(seconds))
        if (text, done) != self._shown:
            self._shown = text, done
            show_on_node(text, self.node_id)
            stopping = comfy.model_management.processing_interrupted()
            broadcast("working", text=text, words=words_of(text), done=done, total=total, stopping=stopping)

    def _text(self, done: int, total: int, seconds: float) -> Text:
        if comfy.model_management.processing_interrupted():
            return Text("stops when this region is compiled")
        number = min(done + 1, total)
        text = Text("compiling {number} of {total}, {seconds} s", number=number, total=total, seconds=round(seconds))
        left, _ = compile_eta()
        _, rest = compile_eta(max(total - done - left, 0))  # regions of the prompt's other nodes
        if rest is None:
            return Text("{text}, first time only", text=text)
        return Text("{text}, about {rest} s left", text=text, rest=rounded(max(rest, 1.0)))


class _Ticker:
    """Calls `tick` in a separate thread until `stop`, first after `delay` seconds."""

    def __init__(self, tick: Callable[[], None], delay: float = _TICK) -> None:
        self._tick, self._delay = tick, delay
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resolute-progress", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()  # so that no text follows the result of the call

    def _run(self) -> None:
        while not self._ended.wait(self._delay):
            self._delay = _TICK
            self._tick()


class CallBar:
    """ComfyUI's bar on the running node, for one long call: a decode or an encode of a video can take minutes. The bar
    counts the blocks of the call; their total is known from an earlier call of the same module.

    The GPU is at most some hundred launches behind the count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._blocks: dict[tuple[int, ...], int] = {}  # by shape: the fewest seen, since a first call runs blocks twice
        self._shape: tuple[int, ...] = ()
        self._done = self._total = 0
        self._begun = 0.0
        self._bar: comfy.utils.ProgressBar | None = None

    def begin(self, shape: Sequence[int]) -> None:
        """A call starts. shape: of its first tensor, frames third if it has five dimensions."""
        self._shape, self._done, self._begun = tuple(shape), 0, self._clock()
        self._total = self._blocks.get(self._shape) or self._expected()

    def advance(self) -> None:
        """A block is about to run. ComfyUI may raise its interruption here."""
        self._done += 1
        if not self._total or (self._bar is None and self._clock() - self._begun < _LONG):
            return
        if self._bar is None:
            self._bar = comfy.utils.ProgressBar(self._total)
        self._bar.update_absolute(min(self._done, self._total))

    def end(self, is_whole: bool) -> None:
        """The call ended. is_whole: it returned its result."""
        if is_whole and self._done:
            self._blocks[self._shape] = min(self._done, self._blocks.get(self._shape, self._done))
        self._shape, self._total, self._bar = (), 0, None

    def _expected(self) -> int:
        """Estimate the blocks from those per frame in the longest call so far; 0 if there was none."""
        shape, blocks = max(self._blocks.items(), key=lambda known: _frames(known[0]), default=((), 0))
        return round(blocks * _frames(self._shape) / _frames(shape)) if blocks else 0


def _frames(shape: Sequence[int]) -> int:
    return shape[2] if len(shape) == 5 else 1
