"""Choices by measurement: candidates are timed once for a key, and the result is kept for this machine.

    FOLDER/<machine>.json    the machine, and (key, value) of each entry, the oldest first

After a restart the choices are the same, and so are the images. No call fails because of this data: a file that is
damaged, of another machine or of another format counts as empty.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from ..keys import digest
from ..store import codec
from ..store.codec import InvalidArtifactError

logger = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T", bound="Trial")

FORMAT = 4  # 4: (key, value) of each entry in the form of `codec.plain`
_MOST = 1024  # entries


@dataclass(frozen=True)
class Trial:
    """The candidates that were measured for one key, the preferred one first.

    seconds: the fastest run of each candidate that works. runs: its number of timed runs; failed: why a candidate
    cannot run. chosen: the candidate to run; empty until it is known.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    runs: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    chosen: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for runs without seconds, which a damaged file may contain."""
        if untimed := self.runs.keys() - self.seconds.keys():
            raise ValueError(f"runs of {untimed} without their seconds")

    def with_run(self: T, candidate: str, seconds: float) -> T:
        """Return the trial after one more run of a candidate. Its fastest run counts: others may use the GPU too."""
        best = min(seconds, self.seconds.get(candidate, seconds))
        runs = {**self.runs, candidate: self.runs.get(candidate, 0) + 1}
        return replace(self, seconds={**self.seconds, candidate: best}, runs=runs)

    def fastest(self, margin: float = 1.0) -> str:
        """Return the first candidate, or the fastest one if it takes at most `margin` of the first one's seconds. Empty
        if none was measured.
        """
        first = next(iter(self.seconds), "")
        best = min(self.seconds, key=lambda name: self.seconds[name], default="")
        return best if best and self.seconds[best] <= margin * self.seconds[first] else first


class Tuner(Generic[K, V]):
    """The results for one purpose, by device and key. Thread-safe. Raises nothing: without its files it is empty."""

    def __init__(
        self, what: str, key: Any, value: Any, folder: Path | None, machine: Callable[[str], tuple[str, ...]]
    ) -> None:
        """what: the plural name of the entries, for log lines. key, value: their types, see `codec.decoded`. folder:
        None keeps nothing on disk. machine: everything that times on a device depend on, see `machine_of`.
        """
        self._what, self._kinds, self._folder, self._machine = what, (key, value), folder, machine
        self._lock = threading.RLock()
        self._machines: dict[str, tuple[str, ...]] = {}
        self._entries: dict[str, dict[K, V]] = {}

    def get(self, device: str, key: K) -> V | None:
        return self._on(device).get(key)

    def is_empty(self, device: str) -> bool:
        return not self._on(device)

    def set(self, device: str, key: K, value: V, save: bool = True) -> None:
        """Keep a result, and evict the oldest one if there are too many. save: write the file now."""
        with self._lock:
            entries = self._on(device)
            entries.pop(key, None)
            entries[key] = value
            while len(entries) > _MOST:
                entries.pop(next(iter(entries)))
            if save:
                self._write(device)

    def remove(self, device: str, key: K) -> None:
        """Forget one result, so that it is measured again."""
        with self._lock:
            if self._on(device).pop(key, None) is not None:
                self._write(device)

    def clear(self) -> None:
        """Forget all results for the devices that this process used, including those of earlier processes."""
        with self._lock:
            for device, entries in self._entries.items():
                if entries:
                    entries.clear()
                    self._write(device)

    def save(self) -> None:
        """Write the results that were set without `save`."""
        with self._lock:
            for device in self._entries:
                self._write(device)

    def on(self, device: str) -> list[tuple[K, V]]:
        """Return the entries of a device, the oldest first."""
        return list(self._on(device).items())

    def __iter__(self) -> Iterator[tuple[str, K, V]]:
        """(device, key, value) of each entry of the devices that this process used."""
        return iter([(device, *entry) for device in list(self._entries) for entry in self.on(device)])

    def _on(self, device: str) -> dict[K, V]:
        if device not in self._entries:
            with self._lock:
                self._machines[device] = self._machine(device)
                self._entries.setdefault(device, self._read(device))
        return self._entries[device]

    def _path(self, device: str) -> Path | None:
        return None if self._folder is None else self._folder / f"{digest(self._machines[device])[:16]}.json"

    def _write(self, device: str) -> None:
        path = self._path(device)
        if path is None:
            return
        try:
            codec.save(path, {"format": FORMAT, "machine": self._machines[device], "entries": self.on(device)})
        except OSError as error:
            logger.warning("Resolute: %s were not stored: %s", self._what, error)

    def _read(self, device: str) -> dict[K, V]:
        path = self._path(device)
        if path is None:
            return {}
        try:
            data = codec.parse_json(codec.read_regular_file(path))
            if data["format"] != FORMAT or tuple(data["machine"]) != self._machines[device]:
                return {}
            key, value = self._kinds
            entries = [(codec.decoded(key, one), codec.decoded(value, other)) for one, other in data["entries"]]
            return dict(entries[-_MOST:])
        except FileNotFoundError:
            return {}
        except (OSError, InvalidArtifactError, ValueError, KeyError, TypeError) as error:
            logger.warning("Resolute: %s in %s are ignored: %s", self._what, path.name, error)
            return {}
