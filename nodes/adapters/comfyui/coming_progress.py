"""Show compiles behind the picture: while the prompt runs, a text on each node whose calls wait for them, and until all
are there, a count on the badge.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from comfy_execution.progress import get_progress_state

from ....compile_cache.backends import registry
from ....compile_cache.calls.rows import LEAST_GAIN, failed_text
from ....compile_cache.texts import Text, words_of
from .messages import broadcast, prompt_runs, show_on_node

_TICK = 0.5  # seconds between two looks

Part = tuple[str | None, str]  # a compile node, and what it does: "sampling"
counts: dict[Part, tuple[int, int]] = {}  # of the regions of each: how many are ready, and of how many

_lock = threading.Lock()
# Those whose run goes on, and whose latest call waited: with the gain of a capture that answered it.
_waiting: dict[Part, Callable[[], float | None] | None] = {}
# Those of which no call ran all regions yet, after one that waited, and what shows that all is compiled.
unfinished: dict[Part, Callable[[Text], None]] = {}
_ticker: threading.Thread | None = None


def waits(part: Part, gain: Callable[[], float | None] | None, show_end: Callable[[Text], None]) -> None:
    """A call ran originals in place of code that is being compiled. gain: of a call that a capture of originals
    answered, how many times as fast that is, as far as it is known. show_end: called once all is compiled, unless a run
    goes on that will say so.
    """
    with _lock:
        _waiting[part] = gain
        unfinished[part] = show_end
    goes_on()


def goes_on() -> None:
    """Regions are compiled: the badge counts them."""
    global _ticker
    with _lock:
        if _ticker is None:
            _ticker = threading.Thread(target=_tick, name="resolute-coming", daemon=True)
            _ticker.start()


def run_ends(part: Part) -> None:
    """No text about it follows the result of its run."""
    with _lock:
        _waiting.pop(part, None)


def has_come(part: Part) -> None:
    """A call ran all its regions compiled."""
    run_ends(part)
    unfinished.pop(part, None)


def rounded(seconds: float) -> int:
    """To a figure that does not pretend to be exact: 7, 25, 140."""
    step = 1 if seconds < 10 else 5 if seconds < 60 else 10
    return max(step * round(seconds / step), 1)


def _about(seconds: float) -> str:
    """The same with its unit: "25 s", from two minutes on "3 min"."""
    return f"{short} s" if (short := rounded(seconds)) < 120 else f"{round(seconds / 60)} min"


def coming(more: int = 0) -> tuple[int, float | None]:
    """Of all backends: how many regions are being compiled, and in how many seconds they are there, with `more` that no
    call left yet; None if nothing tells it yet.
    """
    counts, seconds = zip(*(registry.get(name).coming(more) for name in registry.NAMES), strict=True)
    known = [each for each in seconds if each is not None]
    return sum(counts), max(known) if len(known) == len(seconds) else None


def _text(doing: str, seconds: float | None, gain: Callable[[], float | None] | None) -> Text:
    if gain is None:
        now = Text("{doing} at ComfyUI's speed", doing=doing)
    elif (times := gain() or 0.0) < LEAST_GAIN:
        now = Text("ComfyUI's own blocks as one CUDA graph")
    else:
        now = Text("ComfyUI's own blocks as one CUDA graph ({times} times as fast)", times=f"{times:.1f}")
    if seconds is None:
        return Text("{now}; estimating when compiled blocks are there", now=now)
    return Text("{now}; compiled blocks in about {time}", now=now, time=_about(seconds))


def running_counts() -> dict[Part, tuple[int, int]]:
    """Those of the running prompt."""
    running = get_progress_state().dynprompt.all_node_ids()
    return {part: count for part, count in list(counts.items()) if part[0] in running}


def _lacking() -> int:
    """How many regions of the prompt have no code, those of a decoder that did not run yet too, so that the first
    estimate is one of all. An encoder runs before sampling; one that left nothing by then is not used.
    """
    used = [each for part, each in running_counts().items() if part[1] != "encoding" or part in unfinished]
    return sum(total - ready for ready, total in used)


def failed() -> list[str]:
    """Of all backends: why there is no code of regions in the end, a sentence for each."""
    return [why for name in registry.NAMES for why in registry.get(name).failed_regions()]


def _tick() -> None:
    """The life of the thread: until nothing is left and no run waits."""
    global _ticker
    total = before = 0
    known = len(failed())
    shown: dict[object, str] = {}
    look = threading.Event()
    while not look.wait(_TICK):
        left, _ = coming()
        total, before = total + max(left - before, 0), left
        more = max(_lacking() - total, 0) if prompt_runs() else 0
        _, seconds = coming(more)
        with _lock:
            if not prompt_runs():
                _waiting.clear()
            if not left and not _waiting:
                _ticker = None
                ended = list(unfinished.values())
                break
            for part, gain in _waiting.items() if left else ():
                text = _text(part[1], seconds, gain)
                if shown.get(part) != text:
                    shown[part] = text
                    show_on_node(text, part[0])
        without_code = max(len(failed()) - known, 0)
        text = Text("{done} of {total} regions compiled", done=max(total - left - without_code, 0), total=total + more)
        if without_code:
            text = Text("{text}, {count} failed", text=text, count=without_code)
        if seconds is not None:
            text = Text("{text}, ready in about {time}", text=text, time=_about(seconds))
        if left and shown.get(None) != (now := f"{left} {text}"):  # two models may be at "0 of 18"
            shown[None] = now
            broadcast("coming", left=left, text=text, words=words_of(text))
    reasons = failed()
    text = failed_text(reasons if len(reasons) > known else ()) or Text("Compiled. The next run uses it.")
    for show_end in ended:
        show_end(text)
    broadcast("coming", left=0)
