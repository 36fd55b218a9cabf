"""Calls that gain nothing from a capture, because the GPU is busy all the time without one. Kept over a restart."""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
from collections.abc import Callable

import torch

from ..keys import CaptureKey, GraphKey, digest
from ..store.shape_history import NoGain, ShapeHistory

logger = logging.getLogger(__name__)

LEAST_HOST_SHARE = 0.5  # below that the host is far ahead of the GPU: a capture gains less than 3 percent
_KEPT_SECONDS = 7 * 24 * 3600.0  # then it is measured again: another program may have kept the GPU busy

_Place = tuple[str, int, GraphKey]  # the device, the module's number, and the call without its weights epoch


def machine_of(device: str) -> tuple[str, ...]:
    """What the times of host and GPU depend on, beside the call: the GPU, the host, torch, and ComfyUI's options."""
    host = (platform.system(), platform.machine(), str(os.cpu_count()), platform.python_version())
    gpu: tuple[str, ...] = (device,)
    if device.startswith("cuda"):
        gpu = (torch.cuda.get_device_name(device), str(torch.cuda.get_device_properties(device).total_memory))
    options = sorted(word.partition("=")[0] for word in sys.argv[1:] if word.startswith("--"))  # not ports and paths
    return (*gpu, *host, str(torch.__version__), str(torch.version.cuda), *options)


class CallsWithoutGain:
    """The calls whose capture was refused as useless, by this process or an earlier one on the same machine.

    GraphCache's lock guards it.
    """

    def __init__(
        self,
        shapes: ShapeHistory,
        source: str = "",
        machine: Callable[[str], tuple[str, ...]] = machine_of,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """source: a digest of the code that models run."""
        self._shapes, self._source, self._machine, self._clock = shapes, source, machine, clock
        self._places: set[_Place] = set()
        self._kept: dict[str, dict[GraphKey, NoGain]] = {}  # by model: what its file said, and this process added
        self._trusts_kept = True
        self._here: dict[tuple[str, object], str] = {}

    def has(self, key: CaptureKey) -> bool:
        """Whether a capture of this call was refused, with any weights."""
        return _place(key) in self._places or self._is_kept(key)

    def add(self, key: CaptureKey) -> None:
        """A capture of this call was refused."""
        self._places.add(_place(key))
        found = self._of_model(key)[key.graph] = NoGain(self._where(key), self._clock())
        self._shapes.set_no_gain(key.graph, found)

    def remove(self, key: CaptureKey) -> None:
        """A capture of this call was made."""
        if self._of_model(key).pop(key.graph, None) is not None:
            self._shapes.set_no_gain(key.graph, None)

    def measure_again(self) -> None:
        """Measure each call again, whatever this process or an earlier one found."""
        self._places.clear()
        self._trusts_kept = False

    def forget(self, owner: int) -> None:
        """A module was garbage collected."""
        self._places = {place for place in self._places if place[1] != owner}

    def _is_kept(self, key: CaptureKey) -> bool:
        kept = self._of_model(key).get(key.graph) if self._trusts_kept else None
        if kept is None or not 0 <= self._clock() - kept.at < _KEPT_SECONDS or kept.where != self._where(key):
            return False
        self._places.add(_place(key))
        logger.info("Resolute: %s is not captured, since that gained nothing when it was measured", key.shape)
        return True

    def _of_model(self, key: CaptureKey) -> dict[GraphKey, NoGain]:
        model = key.graph.model
        if model not in self._kept:
            graphs = self._shapes.of_model(model)
            self._kept[model] = {graph.key: graph.no_gain for graph in graphs if graph.no_gain is not None}
        return self._kept[model]

    def _where(self, key: CaptureKey) -> str:
        """A digest of the machine and of the torch flags that the call computes under."""
        place = (key.device, key.state)
        if place not in self._here:
            known = (self._source, LEAST_HOST_SHARE, self._machine(key.device), key.state)
            self._here[place] = digest(known)
        return self._here[place]


def _place(key: CaptureKey) -> _Place:
    return key.device, key.owner, key.graph
