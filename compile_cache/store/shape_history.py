"""The shapes that each model was used with, stored across restarts: one JSON file per model structure.

    FOLDER/<model>.json    display name, keys of its regions, and its graphs, the last used one at the end

No result depends on this data: a file that is damaged or from another version is ignored, and no error here makes a
call fail.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from ..keys import Component, GraphKey, Literal, Role, Signature, TensorSpec
from .artifact_store import DIGEST_CHARS, InvalidArtifactError, parse_json, read_regular_file
from .private_files import atomic_write, files_in, make_private

logger = logging.getLogger(__name__)

FORMAT = 1
_MAX_GRAPHS = 64  # per model
_MAX_SIZES = 4096
_MAX_SIZE = (1 << 63) - 1  # largest dimension in torch (int64)
_MAX_SECONDS = 1 << 40  # largest time that counts as valid
_RETRY_SECONDS = 1.0  # pause after a failed write, because every call runs `record`


@dataclass(frozen=True)
class NoGain:
    """A capture of a graph would gain nothing. where: a digest of the machine that found it; at: Unix time."""

    where: str
    at: float


@dataclass(frozen=True)
class UsedShape:
    """A graph that was used. regions: keys of its regions; seconds: capture time; used: Unix time of the last use.

    size: what it computes for the user, "1024x1024, batch 2"; empty if that is not known.
    no_gain: None if a capture of it gains something, or was not tried. flags: what torch computed under at its last
    use, see `torch_flags`.
    """

    key: GraphKey
    regions: frozenset[str] = frozenset()
    seconds: float = 0.0
    used: float = field(default_factory=time.time)
    size: str = ""
    no_gain: NoGain | None = None
    flags: tuple[Component, ...] = ()


@dataclass(frozen=True)
class Model:
    """A model and its graphs. digest: of its structure, as in GraphKey; name: for display."""

    digest: str
    name: str
    graphs: tuple[UsedShape, ...]  # the last used one at the end

    @property
    def regions(self) -> frozenset[str]:
        return frozenset[str]().union(*(graph.regions for graph in self.graphs))


class HasRegions(Protocol):
    """The part of a program that `record` reads."""

    @property
    def region_keys(self) -> frozenset[str]: ...


class ShapeHistory:
    """Reads and writes the files. Thread-safe; several processes may share a folder, since a write merges."""

    def __init__(self, folder: Path | None) -> None:
        """folder: None stores nothing."""
        self._folder = folder
        self._names: dict[str, str] = {}
        self._sizes: dict[GraphKey, str] = {}
        self._no_gain: dict[GraphKey, NoGain | None] = {}
        self._recorded: dict[GraphKey, tuple[Component, ...]] = {}
        self._retry_at = 0.0  # monotonic time of the next attempt to write
        self._warned = False
        self._lock = threading.Lock()

    def set_name(self, model: str, name: str) -> None:
        """Set the display name of the model with digest `model`."""
        self._names[model] = name

    def set_size(self, key: GraphKey, size: str) -> None:
        """Set what a graph computes for the user, as `UsedShape.size`. Graphs that were never recorded have one too."""
        if len(self._sizes) >= _MAX_SIZES:
            self._sizes.clear()
        self._sizes[key] = size

    def size_of(self, key: GraphKey) -> str:
        """The text that `set_size` set in this process; empty if it set none."""
        return self._sizes.get(key, "")

    def set_no_gain(self, key: GraphKey, no_gain: NoGain | None) -> None:
        """Set whether a capture of a graph gains something. The next `record` stores it."""
        with self._lock:
            self._no_gain[key] = no_gain
            self._recorded.pop(key, None)

    def record(
        self, key: GraphKey, program: HasRegions, seconds: float = 0.0, flags: tuple[Component, ...] = ()
    ) -> None:
        """Store that a graph was used: once per process, `set_no_gain` and change of torch's flags, although every
        call runs this. Raises nothing.

        If writing fails, a later call tries again: Windows cannot replace a file while another program reads it.
        """
        if self._folder is None or self._recorded.get(key) == flags:
            return
        with self._lock:
            if self._recorded.get(key) == flags or time.monotonic() < self._retry_at:
                return
            try:
                size = self.size_of(key)
                self._write(UsedShape(key, program.region_keys, round(seconds, 3), size=size, flags=flags))
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
        """The graphs that a model was used with, the last used one at the end."""
        found = None if self._folder is None else _readable(self._path(model))
        return () if found is None or found.digest != model else found.graphs

    def models(self) -> list[Model]:
        """All stored models, the last used one first."""
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
            graph = replace(graph, seconds=graph.seconds or before.seconds, no_gain=before.no_gain)
        if graph.key in self._no_gain:
            graph = replace(graph, no_gain=self._no_gain[graph.key])
        kept = [each for each in others if each.key != graph.key][-(_MAX_GRAPHS - 1) :]
        name = self._names.get(digest) or (known.name if known is not None else "") or "a model"
        make_private(path.parent)
        with atomic_write(path) as stream:
            stream.write(json.dumps(_plain(Model(digest, name, (*kept, graph)))).encode())


# --- as JSON ---------------------------------------------------------------------------------------------------


def _plain(model: Model) -> dict[str, Any]:
    regions = sorted(model.regions)
    number = {key: index for index, key in enumerate(regions)}
    graphs = [
        {
            "role": graph.key.role.value,
            "backend": graph.key.backend,
            "tensors": [[name, asdict(spec)] for name, spec in graph.key.signature.tensors],
            "values": graph.key.signature.values,
            "options": graph.key.options,
            "regions": sorted(number[key] for key in graph.regions),
            "seconds": graph.seconds,
            "used": graph.used,
            "size": graph.size,
            "flags": graph.flags,
            **({} if graph.no_gain is None else {"no_gain": asdict(graph.no_gain)}),
        }
        for graph in model.graphs
    ]
    return {"format": FORMAT, "model": model.digest, "name": model.name, "regions": regions, "graphs": graphs}


def _readable(path: Path) -> Model | None:
    try:
        return _read(path)
    except OSError as error:
        logger.info("Resolute: %s cannot be read (%s)", path.name, error)
        return None


def _read(path: Path) -> Model | None:
    """None if there is no file, or if it is damaged or from another version.

    Raises OSError if it cannot be read at the moment: the caller must not replace it then, because it may be valid.
    """
    try:
        return _model(parse_json(read_regular_file(path)))
    except FileNotFoundError:
        return None
    except (InvalidArtifactError, ValueError, KeyError, TypeError, IndexError) as error:
        logger.info("Resolute: %s is ignored: damaged or from another version (%s)", path.name, type(error).__name__)
        return None


# The functions below raise ValueError, KeyError, TypeError or IndexError for data that Resolute did not write.


def _model(data: Any) -> Model:
    if data["format"] != FORMAT:
        raise ValueError("it has another format")
    digest, regions = _text(data["model"]), [_region(key) for key in _list(data["regions"])]
    graphs = [
        UsedShape(
            _key(graph, digest),
            frozenset(regions[_whole(index, len(regions))] for index in _list(graph["regions"])),
            _seconds(graph["seconds"]),
            _seconds(graph["used"]),
            _text(graph.get("size", "")),  # earlier versions wrote none
            _no_gain(graph.get("no_gain")),
            _components(graph.get("flags", [])),
        )
        for graph in _list(data["graphs"])[-_MAX_GRAPHS:]
    ]
    return Model(digest, _text(data["name"]), tuple(graphs))


def _key(graph: Any, model: str) -> GraphKey:
    tensors = tuple((_text(name), _spec(spec)) for name, spec in _list(graph["tensors"]))
    signature = Signature(tensors, _components(graph["values"]))
    return GraphKey(signature, Role(graph["role"]), model, _text(graph["backend"]), _components(graph["options"]))


def _no_gain(data: Any) -> NoGain | None:
    return None if data is None else NoGain(_text(data["where"]), _seconds(data["at"]))


def _spec(data: Any) -> TensorSpec:
    others = dict(data)
    sizes = _list(others.pop("shape"))
    shape = tuple(_whole(size, _MAX_SIZE) for size in sizes)
    return TensorSpec(shape, **{name: _text(value) for name, value in others.items()})


def _components(data: Any) -> tuple[Component, ...]:
    return tuple((_text(name), _literal(value)) for name, value in _list(data))


def _literal(value: Any) -> Literal:
    if isinstance(value, list):
        return tuple(_literal(item) for item in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} cannot be part of a key")


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError("it is not a list")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("it is not a string")
    return value


def _region(value: Any) -> str:
    """A region's key. It becomes part of a glob pattern, so it may only have letters and digits."""
    key = _text(value)
    if not (key.isascii() and key.isalnum()):
        raise ValueError("it is not the key of a region")
    return key


def _whole(value: Any, maximum: int) -> int:
    if type(value) is not int or not 0 <= value <= maximum:
        raise ValueError("it is not a whole number in range")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _MAX_SECONDS:  # NaN fails the comparison
        raise ValueError("it is not a time")
    return float(value)
