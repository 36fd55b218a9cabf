"""A table of measurements on one machine, kept on disk: two starts choose alike, and compute the same picture.

    FOLDER/<machine>.json    the machine, and a list of entries, the oldest first

A table is valid for one machine and its versions. A file that is damaged or of another format is ignored.
"""

from __future__ import annotations

import json
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from ..keys import digest
from ..store.artifact_store import InvalidArtifactError, parse_json, read_regular_file
from ..store.private_files import make_private, write_file
from ..torch_facts.private_names import driver_version

logger = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_MOST = 1024  # entries
_LONGEST = 1000  # characters of a text


def machine_of(device: torch.device) -> tuple[str, ...]:
    """The GPU and the versions that the times of its kernels depend on."""
    if device.type != "cuda":
        return (device.type, str(torch.__version__))
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return (name, str(capability), *map(str, (driver_version(), torch.__version__, torch.version.cuda, cudnn)))


class MachineTable(ABC, Generic[K, V]):
    """The entries of one machine. Thread-safe. Raises nothing: without its file it is empty."""

    what: str  # is in it, for people
    format: int

    def __init__(self, folder: Path | None, machine: tuple[str, ...]) -> None:
        """folder: None keeps nothing on disk."""
        self._path = None if folder is None else folder / f"{digest(machine)[:16]}.json"
        self._machine = machine
        self._lock = threading.Lock()
        self._entries: dict[K, V] = self._read()

    @abstractmethod
    def plain(self, key: K, value: V) -> dict[str, Any]:
        """An entry as JSON."""

    @abstractmethod
    def entry(self, data: Any) -> tuple[K, V]:
        """Raises ValueError, KeyError, TypeError, AttributeError or OverflowError for what `plain` does not give."""

    def get(self, key: K) -> V | None:
        return self._entries.get(key)

    def set(self, key: K, value: V) -> None:
        """The oldest entry goes if there are too many."""
        with self._lock:
            self._entries.pop(key, None)
            self._entries[key] = value
            while len(self._entries) > _MOST:
                self._entries.pop(next(iter(self._entries)))
            self._write()

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._write()

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return iter(list(self._entries.items()))

    def _write(self) -> None:
        if self._path is None:
            return
        entries = [self.plain(key, value) for key, value in self]
        try:
            make_private(self._path.parent)
            text = json.dumps({"format": self.format, "machine": self._machine, "entries": entries}, indent=1)
            write_file(self._path, text.encode())
        except OSError as error:
            logger.warning("Resolute: %s were not stored: %s", self.what, error)

    def _read(self) -> dict[K, V]:
        if self._path is None:
            return {}
        try:
            data = parse_json(read_regular_file(self._path))
            if data["format"] != self.format or tuple(data["machine"]) != self._machine:
                return {}
            return dict(self.entry(each) for each in data["entries"][-_MOST:])
        except FileNotFoundError:
            return {}
        except (OSError, InvalidArtifactError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            logger.warning("Resolute: %s in %s are ignored: %s", self.what, self._path.name, error)
            return {}


def sizes_in(values: Any, count: int | None = None) -> tuple[int, ...]:
    """Sizes from a file, `count` of them. Raises ValueError or TypeError."""
    right = count is None or len(values) == count
    if not right or not all(type(each) is int and 0 <= each < 1 << 40 for each in values):
        raise ValueError(f"{values!r:.80} are not {'' if count is None else count} sizes")
    return tuple(values)


def text_in(value: Any) -> str:
    """A short text from a file. Raises ValueError."""
    if not isinstance(value, str) or len(value) > _LONGEST:
        raise ValueError(f"{value!r:.80} is not a short text")
    return value
