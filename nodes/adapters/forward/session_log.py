"""One line for each sampling run, and for a decode that had to wait: what it did, what it waited for, and why."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ..process import runtime

if TYPE_CHECKING:
    from .module_runner import ModuleRunner

logger = logging.getLogger(__name__)

_COUNTED = {
    "replays": "replays",
    "graph_calls": "calls through regions",
    "eager_calls": "eager calls",
    "captures": "captures",
    "region_compiles": "region compiles",
}
_MOST_NEWS = 3
_WORTH_TELLING = 0.05  # seconds


class SessionLog:
    def __init__(self, runner: ModuleRunner) -> None:
        self._runner = runner
        self._before: dict[str, Any] = {}
        self._told = 0

    def begin(self) -> None:
        stats = runtime.cache().stats
        self._before, self._told = stats.snapshot(), stats.told

    def end(self, only_if_waited: bool = False) -> None:
        """Log the summary and show it on the node."""
        if not self._before:
            return
        after = runtime.cache().stats.snapshot()
        waited = after["stall_seconds"] - self._before["stall_seconds"]
        if only_if_waited and waited < _WORTH_TELLING:
            return
        parts = [
            f"{after[key] - self._before[key]} {text}"
            for key, text in _COUNTED.items()
            if after[key] > self._before[key]
        ]
        bypasses = [
            f"{count - self._before['bypasses'].get(reason, 0)}x {reason}"
            for reason, count in after["bypasses"].items()
            if count > self._before["bypasses"].get(reason, 0)
        ]
        line = ", ".join(parts) or "no calls"
        if waited >= _WORTH_TELLING:
            line += f", waited {waited:.1f} s"
        news = [event.text for event in runtime.cache().stats.events_since(self._told) if event.kind == "signature"]
        if news:
            line += f"; new: {'; '.join(news[:_MOST_NEWS])}" + ("; ..." if len(news) > _MOST_NEWS else "")
        if bypasses:
            line += f"; bypassed: {', '.join(bypasses)}"
        self._before = {}
        logger.info("Resolute: %s", line)
        self._runner.progress.show(line)
