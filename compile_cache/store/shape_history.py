"""The shapes that models were used with, over restarts: plain JSON, one file per structure of a model.

    FOLDER/<model>.json    its name for people, the keys of its regions, and the graphs that it met, latest use last

Nothing here is needed to be right: a file that is damaged, or from another version, is as good as none, and no failure
in here costs a call.
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
from .artifact_store import InvalidArtifactError, parse, plain_file
from .private_files import make_private, replacing

logger = logging.getLogger(__name__)

FORMAT = 1
_MOST_GRAPHS = 64  # for each model
_NAMED = 16  # characters of a digest in a file's name
_MOST_SIZE = (1 << 63) - 1  # of a dimension, as torch counts
_MOST_SECONDS = 1 << 40  # of a time
_PAUSE = 1.0  # seconds without another attempt after one that failed: `note` is asked at every call


@dataclass(frozen=True)
class Remembered:
    """One graph that was met. regions: keys of what it runs through; seconds: of its capture; used: Unix time."""

    key: GraphKey
    regions: frozenset[str] = frozenset()
    seconds: float = 0.0
    used: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Model:
    """digest: of the model's structure, as in GraphKey; name: for people."""

    digest: str
    name: str
    graphs: tuple[Remembered, ...]  # latest use last

    @property
    def regions(self) -> frozenset[str]:
        return frozenset[str]().union(*(graph.regions for graph in self.graphs))


class HasRegions(Protocol):
    """What a program tells of itself."""

    @property
    def region_keys(self) -> frozenset[str]: ...


class ShapeHistory:
    """Thread-safe; several processes may share a folder, and the last one to write a model's file adds to it."""

    def __init__(self, folder: Path | None) -> None:
        """folder: None remembers nothing."""
        self._folder = folder
        self._names: dict[str, str] = {}
        self._noted: set[GraphKey] = set()
        self._again = 0.0  # monotonic time of the next attempt
        self._warned = False
        self._lock = threading.Lock()

    def name(self, model: str, name: str) -> None:
        """What people call the model with this digest."""
        self._names[model] = name

    def record(self, key: GraphKey, program: HasRegions, seconds: float = 0.0) -> None:
        """A graph was met; written once in each process, and asked at every call. Where that fails, a later call tries
        again: on Windows, a file cannot be replaced while another thread or program reads it. Raises nothing.
        """
        if self._folder is None or key in self._noted:
            return
        with self._lock:
            if key in self._noted or time.monotonic() < self._again:
                return
            try:
                self._write(Remembered(key, program.region_keys, round(seconds, 3)))
                self._noted.add(key)
            except Exception as error:
                self._again = time.monotonic() + _PAUSE
                if not self._warned:
                    self._warned = True
                    ours = None if isinstance(error, OSError) else error
                    logger.warning(
                        "Resolute: a shape was not remembered, a later call tries again (%s)", error, exc_info=ours
                    )

    def of_model(self, model: str) -> tuple[Remembered, ...]:
        """The graphs that a model was used with, latest use last."""
        found = None if self._folder is None else _readable(self._path(model))
        return () if found is None or found.digest != model else found.graphs

    def models(self) -> list[Model]:
        """Everything that is remembered, the model that was used last first."""
        files = [] if self._folder is None else sorted(self._folder.glob("*.json"))
        found = [model for file in files if (model := _readable(file)) is not None and model.graphs]
        return sorted(found, key=lambda model: model.graphs[-1].used, reverse=True)

    def _path(self, model: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{model[:_NAMED]}.json"

    def _write(self, graph: Remembered) -> None:
        digest = graph.key.model
        path = self._path(digest)
        known = _read(path)
        others = () if known is None or known.digest != digest else known.graphs
        before = next((each for each in others if each.key == graph.key), None)
        if before is not None and not graph.seconds:
            graph = replace(graph, seconds=before.seconds)
        kept = [each for each in others if each.key != graph.key][-(_MOST_GRAPHS - 1) :]
        name = self._names.get(digest) or (known.name if known is not None else "") or "a model"
        make_private(path.parent)
        with replacing(path) as stream:
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
    """None where there is no file, or one that says nothing to this version.

    Raises OSError where it cannot be read now: nobody may then replace it, for it may hold what is worth keeping.
    """
    try:
        return _model(parse(plain_file(path)))
    except FileNotFoundError:
        return None
    except (InvalidArtifactError, ValueError, KeyError, TypeError, IndexError) as error:
        logger.info("Resolute: %s says nothing that could be understood (%s)", path.name, type(error).__name__)
        return None


# What follows raises ValueError, KeyError, TypeError or IndexError for what no process of ours has written.


def _model(data: Any) -> Model:
    if data["format"] != FORMAT:
        raise ValueError("it has another format")
    digest, regions = _text(data["model"]), [_region(key) for key in _list(data["regions"])]
    graphs = [
        Remembered(
            _key(graph, digest),
            frozenset(regions[_whole(index, len(regions))] for index in _list(graph["regions"])),
            _seconds(graph["seconds"]),
            _seconds(graph["used"]),
        )
        for graph in _list(data["graphs"])[-_MOST_GRAPHS:]
    ]
    return Model(digest, _text(data["name"]), tuple(graphs))


def _key(graph: Any, model: str) -> GraphKey:
    tensors = tuple((_text(name), _spec(spec)) for name, spec in _list(graph["tensors"]))
    signature = Signature(tensors, _components(graph["values"]))
    return GraphKey(signature, Role(graph["role"]), model, _text(graph["backend"]), _components(graph["options"]))


def _spec(told: Any) -> TensorSpec:
    others = dict(told)
    sizes = _list(others.pop("shape"))
    shape = tuple(_whole(size, _MOST_SIZE) for size in sizes)
    return TensorSpec(shape, **{name: _text(value) for name, value in others.items()})


def _components(data: Any) -> tuple[Component, ...]:
    return tuple((_text(name), _literal(value)) for name, value in _list(data))


def _literal(value: Any) -> Literal:
    if isinstance(value, list):
        return tuple(_literal(item) for item in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} is no part of a key")


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError("it is no list")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("it is no text")
    return value


def _region(value: Any) -> str:
    """A key that is looked for by a pattern of file names, where it must be nothing else."""
    key = _text(value)
    if not (key.isascii() and key.isalnum()):
        raise ValueError("it is no key of a region")
    return key


def _whole(value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError("it is no number in range")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _MOST_SECONDS:  # NaN is not
        raise ValueError("it is no time")
    return float(value)
