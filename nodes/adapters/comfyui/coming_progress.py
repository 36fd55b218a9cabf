"""Show compiles behind the picture: while the prompt runs, a text on each node whose calls wait for them, and until all
are there, a count on the badge.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ....compile_cache.backends import registry
from ....compile_cache.texts import Text, words_of
from .messages import broadcast, prompt_runs, show_on_node

_TICK = 0.5  # seconds between two looks

Part = tuple[str | None, str]  # a compile node, and what it does: "sampling"

_lock = threading.Lock()
_waiting: set[Part] = set()  # those whose run goes on, and whose latest call waited
# Those of which no call ran all regions yet, after one that waited. A node that is executed anew has another progress.
unfinished: set[Part] = set()
_ticker: threading.Thread | None = None
_lacking: Callable[[], int]


def waits(part: Part, lacking: Callable[[], int]) -> None:
    """A call ran originals in place of code that is being compiled. lacking: counts the prompt's regions without code,
    those of a decoder that did not run yet too, so that the first estimate is one of all.
    """
    global _ticker, _lacking
    with _lock:
        _lacking = lacking
        _waiting.add(part)
        unfinished.add(part)
        if _ticker is None:
            _ticker = threading.Thread(target=_tick, name="resolute-coming", daemon=True)
            _ticker.start()


def run_ends(part: Part) -> None:
    """No text about it follows the result of its run."""
    with _lock:
        _waiting.discard(part)


def has_come(part: Part) -> None:
    """A call ran all its regions compiled."""
    with _lock:
        _waiting.discard(part)
        unfinished.discard(part)


def rounded(seconds: float) -> int:
    """To a figure that does not pretend to be exact: 7, 25, 140."""
    step = 1 if seconds < 10 else 5 if seconds < 60 else 10
    return max(step * round(seconds / step), 1)


def _about(seconds: float) -> str:
    """The same with its unit: "25 s", from two minutes on "3 min"."""
    return f"{short} s" if (short := rounded(seconds)) < 120 else f"{round(seconds / 60)} min"


def _tick() -> None:
    """The life of the thread: until nothing is left and no run waits."""
    global _ticker
    total = before = 0
    shown: dict[object, str] = {}
    look = threading.Event()
    while not look.wait(_TICK):
        left = sum(registry.get(name).coming()[0] for name in registry.NAMES)
        total, before = total + max(left - before, 0), left
        more = max(_lacking() - total, 0) if prompt_runs() else 0
        time = _about(max(registry.get(name).coming(more)[1] for name in registry.NAMES))
        with _lock:
            if not prompt_runs():
                _waiting.clear()
            if not left and not _waiting:
                _ticker = None
                break
            for part in _waiting if left else ():
                values = {"time": time, "doing": part[1]}
                text = Text("ready in about {time}, {doing} as ComfyUI does until then", **values)
                if shown.get(part) != text:
                    shown[part] = text
                    show_on_node(text, part[0])
        counts = {"done": total - left, "total": total + more, "time": time}
        text = Text("{done} of {total} regions compiled, ready in about {time}", **counts)
        if left and shown.get(None) != text:
            shown[None] = text
            broadcast("coming", left=left, text=text, words=words_of(text))
    broadcast("coming", left=0)
