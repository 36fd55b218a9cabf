"""The calls whose capture would gain nothing, because the GPU is busy all the time without it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from ..keys import CallWithoutEpoch, CaptureKey, digest
from .machine import host, machine_of
from .tuner import Tuner

logger = logging.getLogger(__name__)

LEAST_HOST_SHARE = 0.5  # below that the host is far ahead of the GPU: a capture gains less than 3 percent
_KEPT_SECONDS = 7 * 24 * 3600.0  # then it is measured again: another program may have kept the GPU busy
_MOST_NAMES = 4096


class GpuBoundCalls:
    """The calls whose capture was refused as useless, by this process or an earlier one on the same machine."""

    def __init__(self, folder: Path | None, source: str = "", clock: Callable[[], float] = time.time) -> None:
        """folder: None keeps nothing on disk. source: a digest of the code that models run."""
        self._clock = clock
        self._tuner = Tuner[str, float](
            "calls that gain nothing from a capture", str, float, folder,
            lambda device: (*machine_of(device), *host(), source, str(LEAST_HOST_SHARE)),
        )  # fmt: skip
        self._names: dict[CallWithoutEpoch, str] = {}

    def has(self, key: CaptureKey) -> bool:
        """True if the call was measured less than a week ago. Clocks may be set back."""
        if self._tuner.is_empty(key.device):
            return False
        call = key.without_epoch
        is_first = call not in self._names
        measured = self._tuner.get(key.device, self._name(call))
        found = measured is not None and 0 <= self._clock() - measured < _KEPT_SECONDS
        if found and is_first:
            logger.info("Resolute: %s is not captured, since that gained nothing when it was measured", key.shape)
        return found

    def add(self, key: CaptureKey) -> None:
        self._tuner.set(key.device, self._name(key.without_epoch), self._clock())

    def remove(self, key: CaptureKey) -> None:
        if not self._tuner.is_empty(key.device):
            self._tuner.remove(key.device, self._name(key.without_epoch))

    def measure_again(self) -> None:
        """Measure each call again, whatever this process or an earlier one found."""
        self._tuner.clear()

    def forget(self, owner: int) -> None:
        """A module was garbage collected. What was measured holds for the next one with its structure too."""
        self._names = {call: name for call, name in self._names.items() if call.owner != owner}

    def _name(self, call: CallWithoutEpoch) -> str:
        """A digest of the graph and of the torch flags that it computes under. Every call asks for it."""
        if call not in self._names:
            if len(self._names) >= _MOST_NAMES:
                self._names.clear()
            self._names[call] = digest((call.graph.digest(), call.torch_flags))
        return self._names[call]
