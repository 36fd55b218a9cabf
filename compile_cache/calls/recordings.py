"""Calls seen during a warm-up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..keys import CaptureKey

RecordedCalls = dict[CaptureKey, bool]  # calls that were made, and whether each has a capture


class Recordings:
    """The recordings that run now. Calls of any thread go into all of them."""

    def __init__(self) -> None:
        self._running: list[RecordedCalls] = []

    @contextmanager
    def record(self) -> Iterator[RecordedCalls]:
        """Record the calls made inside the `with`."""
        recorded: RecordedCalls = {}
        self._running.append(recorded)
        try:
            yield recorded
        finally:
            self._running = [recording for recording in self._running if recording is not recorded]

    def note(self, key: CaptureKey, has_capture: bool) -> None:
        """A call was made."""
        for recording in self._running:
            recording[key] = has_capture
