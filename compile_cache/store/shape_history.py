"""The shapes that each model was used with, stored across restarts: one JSON file per model structure.

    FOLDER/<model>.json    display name, keys of its regions, and its graphs, the last used one at the end

No result depends on this data: a file that is damaged or from another version is ignored, and no error here makes a
call fail.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from ..keys import Component, GraphKey
from . import codec
from .artifact_store import DIGEST_CHARS
from .codec import InvalidArtifactError
from .private_files import files_in

logger = logging.getLogger(__name__)

FORMAT = 2  # 2: in the form of `codec.plain`
_MAX_GRAPHS = 64  # per model
_MAX_SIZES = 1024  # in memory
_RETRY_SECONDS = 1.0  # pause after a failed write, because every call runs `record`


@dataclass(frozen=True)
class UsedShape:
    """A graph that was used. regions: keys of its regions; seconds: capture time; used: Unix time of the last use.

    size: the size that it computes for the user, "1024x1024, batch 2"; empty if it is not known. flags: torch's flags
    at its last use, see `torch_flags`. application: the application of its last use, as in `CacheConfig`.

    Raises ValueError for a region's key with other characters than letters and digits: it goes into a glob pattern.
    """

    key: GraphKey
    regions: frozenset[str] = frozenset()
    seconds: float = 0.0
    used: float = field(default_factory=time.time)
    size: str = ""
    flags: tuple[Component, ...] = ()
    application: str = ""

    def __post_init__(self) -> None:
        if not all(key.isascii() and key.isalnum() for key in self.regions):
            raise ValueError("it has a region whose key has more than letters and digits")


@dataclass(frozen=True)
class Model:
    """A model and its graphs. digest: of its structure, as in GraphKey; name: for display."""

    digest: str
    name: str
    graphs: tuple[UsedShape, ...]  # the last used one at the end
    format: int = FORMAT

    @property
    def regions(self) -> frozenset[str]:
        return frozenset[str]().union(*(graph.regions for graph in self.graphs))


class HasRegions(Protocol):
    """The part of a program that `record` reads."""

    @property
    def region_keys(self) -> frozenset[str]: ...


class ShapeHistory:
    """Reads and writes the files. Thread-safe; several processes may share a folder, since a write merges."""

    def __init__(self, folder: Path | None, application: str = "") -> None:
        """folder: None stores nothing. application: of what is recorded."""
        self._folder, self._application = folder, application
        self._names: dict[str, str] = {}
        self._sizes: dict[GraphKey, str] = {}
        self._recorded: dict[GraphKey, tuple[Component, ...]] = {}
        self._retry_at = 0.0  # monotonic time of the next attempt to write
        self._warned = False
        self._lock = threading.Lock()

    def set_name(self, model: str, name: str) -> None:
        """Set the display name of the model with digest `model`."""
        self._names[model] = name

    def set_size(self, key: GraphKey, size: str) -> None:
        """Set the size that a graph computes for the user, see `UsedShape.size`. The graph need not be recorded."""
        if len(self._sizes) >= _MAX_SIZES:
            self._sizes.clear()
        self._sizes[key] = size

    def size_of(self, key: GraphKey) -> str:
        """Return the text that `set_size` set in this process; empty if it set none."""
        return self._sizes.get(key, "")

    def record(
        self, key: GraphKey, program: HasRegions, seconds: float = 0.0, flags: tuple[Component, ...] = ()
    ) -> None:
        """Store that a graph was used: once per process and change of torch's flags, though every call calls this.
        Raises nothing.

        If writing fails, a later call tries again: Windows cannot replace a file while another program reads it.
        """
        if self._folder is None or self._recorded.get(key) == flags:
            return
        with self._lock:
            if self._recorded.get(key) == flags or time.monotonic() < self._retry_at:
                return
            try:
                about = (time.time(), self.size_of(key), flags, self._application)
                self._write(UsedShape(key, program.region_keys, round(seconds, 3), *about))
                if len(self._recorded) >= _MAX_SIZES:  # graphs that recur are written again
                    self._recorded.clear()
                self._recorded[key] = flags
            except Exception as error:
                self._retry_at = time.monotonic() + _RETRY_SECONDS
                if not self._warned:
                    self._warned = True
                    trace = None if isinstance(error, OSError) else error
                    logger.warning(
                        "Resolute: a shape could not be stored; a later call tries again (%s)", error, exc_info=trace
                    )

    def of_model(self, model: str) -> tuple[UsedShape, ...]:
        """Return the graphs that a model was used with, the last used one at the end."""
        found = None if self._folder is None else _readable(self._path(model))
        return () if found is None or found.digest != model else found.graphs

    def models(self) -> list[Model]:
        """Return all stored models, the last used one first."""
        files = [] if self._folder is None else files_in(self._folder, "*.json")
        found = [model for file in files if (model := _readable(file)) is not None and model.graphs]
        return sorted(found, key=lambda model: model.graphs[-1].used, reverse=True)

    def _path(self, model: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{model[:DIGEST_CHARS]}.json"

    def _write(self, graph: UsedShape) -> None:
        digest = graph.key.model
        path = self._path(digest)
        known = _read(path)
        others = () if known is None or known.digest != digest else known.graphs
        before = next((each for each in others if each.key == graph.key), None)
        if before is not None:
            graph = replace(graph, seconds=graph.seconds or before.seconds)
        kept = [each for each in others if each.key != graph.key][-(_MAX_GRAPHS - 1) :]
        name = self._names.get(digest) or (known.name if known is not None else "") or "a model"
        codec.save(path, Model(digest, name, (*kept, graph)))


def _readable(path: Path) -> Model | None:
    try:
        return _read(path)
    except OSError as error:
        logger.info("Resolute: %s cannot be read (%s)", path.name, error)
        return None


def _read(path: Path) -> Model | None:
    """Return None if there is no file, or if it is damaged or from another version.

    Raises OSError if it cannot be read now: then the caller must not replace it, because it may be valid.
    """
    try:
        model: Model = codec.load(path, Model)
        if model.format != FORMAT or len(model.graphs) > _MAX_GRAPHS:
            raise InvalidArtifactError(f"format {model.format}, {len(model.graphs)} graphs")
        return model
    except FileNotFoundError:
        return None
    except InvalidArtifactError as error:
        logger.info("Resolute: %s is ignored: damaged or from another version (%s)", path.name, error)
        return None
