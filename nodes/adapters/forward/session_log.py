"""One log line for each sampling run, and for a decode that had to wait: what it did, how long it waited, and why."""

from __future__ import annotations

import logging
from typing import Any

from ..comfyui.progress import NodeProgress
from ..process import runtime

logger = logging.getLogger(__name__)

_COUNTED = {
    "replays": "replays",
    "graph_calls": "calls through regions",
    "eager_calls": "eager calls",
    "captures": "captures",
    "region_compiles": "region compiles",
}
_MAX_NEW_SIGNATURES = 3
_SHORT_WAIT = 0.05  # seconds; less is not mentioned


class SessionLog:
    """Compares the cache's counters at the start and at the end of a sampling run."""

    def __init__(self, progress: NodeProgress) -> None:
        self._progress = progress
        self._before: dict[str, Any] = {}
        self._events_before = 0

    def begin(self) -> None:
        stats = runtime.cache().stats
        self._before, self._events_before = stats.snapshot(), stats.event_count

    def end(self, only_if_waited: bool = False, why_no_calls: str = "") -> None:
        """Log the summary and show it on the node. why_no_calls: for a run in which nothing ran compiled."""
        if not self._before:
            return
        after = runtime.cache().stats.snapshot()
        waited = after["stall_seconds"] - self._before["stall_seconds"]
        if only_if_waited and waited < _SHORT_WAIT:
            return
        line = self._summary(after, waited, why_no_calls)
        self._before = {}
        logger.info("Resolute: %s", line)
        self._progress.show(line)

    def _summary(self, after: dict[str, Any], waited: float, why_no_calls: str) -> str:
        before = self._before
        parts = [f"{after[key] - before[key]} {text}" for key, text in _COUNTED.items() if after[key] > before[key]]
        bypasses = [
            f"{count - before['bypasses'].get(code, 0)}x {code}"
            for code, count in after["bypasses"].items()
            if count > before["bypasses"].get(code, 0)
        ]
        line = ", ".join(parts) or "no calls"
        if why_no_calls:
            line += f": {why_no_calls}"
        if waited >= _SHORT_WAIT:
            line += f", waited {waited:.1f} s"
        events = runtime.cache().stats.events_since(self._events_before)
        new = [event.text for event in events if event.kind == "signature"]
        if new:
            more = "; ..." if len(new) > _MAX_NEW_SIGNATURES else ""
            line += f"; new: {'; '.join(new[:_MAX_NEW_SIGNATURES])}{more}"
        if bypasses:
            line += f"; bypassed: {', '.join(bypasses)}"
        return line
