"""Show background compiles: a text on each node whose calls wait for them, while the prompt runs, and a count on the
badge until all are done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from comfy_execution.progress import get_progress_state

from ....compile_cache.backends import registry
from ....compile_cache.telemetry.rows import LEAST_GAIN, failed_text
from ....compile_cache.texts import Text, words_of
from .messages import broadcast, prompt_runs, show_on_node

_TICK = 0.5  # seconds between two updates

Part = tuple[str | None, str]  # the id of a compile node, and its activity: "sampling"
counts: dict[Part, tuple[int, int]] = {}  # (ready, total) regions of each part

_lock = threading.Lock()
# Parts with a run in progress whose latest call waited for code, with the speedup of the capture that served the call.
_waiting: dict[Part, Callable[[], float | None] | None] = {}
# Parts that waited for code and have not run all regions compiled since, with the function that shows the end.
unfinished: dict[Part, Callable[[Text], None]] = {}
_ticker: threading.Thread | None = None


def note_waiting_call(part: Part, gain: Callable[[], float | None] | None, show_end: Callable[[Text], None]) -> None:
    """Note that a call ran original blocks while their code is being compiled. gain: if a capture of the originals
    served the call, returns its speedup, None while unknown. show_end: called with a text once all is compiled, unless
    a run in progress reports it.
    """
    with _lock:
        _waiting[part] = gain
        unfinished[part] = show_end
    ensure_ticker()


def ensure_ticker() -> None:
    """Start the thread that counts compiling regions on the badge, if it is not running."""
    global _ticker
    with _lock:
        if _ticker is None:
            _ticker = threading.Thread(target=_tick, name="resolute-coming", daemon=True)
            _ticker.start()


def run_ends(part: Part) -> None:
    """Show no more texts about the part, so that the result of its run stays on the node."""
    with _lock:
        _waiting.pop(part, None)


def note_all_compiled(part: Part) -> None:
    """Note that a call of the part ran all its regions compiled."""
    run_ends(part)
    unfinished.pop(part, None)


def rounded(seconds: float) -> int:
    """Round seconds to an approximate figure: 7, 25, 140."""
    step = 1 if seconds < 10 else 5 if seconds < 60 else 10
    return max(step * round(seconds / step), 1)


def _about(seconds: float) -> str:
    """Rounded seconds with their unit: "25 s", from two minutes on "3 min"."""
    return f"{short} s" if (short := rounded(seconds)) < 120 else f"{round(seconds / 60)} min"


def compile_eta(more: int = 0) -> tuple[int, float | None]:
    """How many regions all backends are compiling, and the seconds until these are ready, and `more` regions that no
    call has requested yet. The seconds are None while there is no estimate.
    """
    counts, seconds = zip(*(registry.get(name).compile_eta(more) for name in registry.NAMES), strict=True)
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
    """The `counts` of the running prompt's nodes."""
    running = get_progress_state().dynprompt.all_node_ids()
    return {part: count for part, count in list(counts.items()) if part[0] in running}


def _uncompiled_count() -> int:
    """How many regions of the prompt have no code. Those of a decoder that has not run yet count too, so that the first
    estimate covers all. An encoder runs before sampling; if it left no region to compile by then, it is not used.
    """
    used = [each for part, each in running_counts().items() if part[1] != "encoding" or part in unfinished]
    return sum(total - ready for ready, total in used)


def failed() -> list[str]:
    """Why regions of all backends failed to compile, a sentence for each."""
    return [why for name in registry.NAMES for why in registry.get(name).failed_regions()]


def _tick() -> None:
    """The loop of the thread: update the texts until no region is being compiled and no run waits."""
    global _ticker
    total = before = 0
    known = len(failed())
    shown: dict[object, str] = {}
    look = threading.Event()
    while not look.wait(_TICK):
        left, _ = compile_eta()
        total, before = total + max(left - before, 0), left
        more = max(_uncompiled_count() - total, 0) if prompt_runs() else 0
        _, seconds = compile_eta(more)
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
