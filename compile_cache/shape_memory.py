"""The shapes that models were used with, over restarts: plain JSON, one file per structure of a model.

    FOLDER/<model>.json    its name for people, the keys of its regions, and the graphs that it met, latest use last

Nothing here is needed to be right: a file that is damaged, or from another version, is as good as none.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from .keys import Component, GraphKey, Literal, Role, Signature, TensorSpec

logger = logging.getLogger(__name__)

FORMAT = 1
_MOST_GRAPHS = 64  # for each model
_NAMED = 16  # characters of a digest in a file's name


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


class ShapeMemory:
    """Thread-safe; several processes may share a folder, and the last one to write a model's file adds to it."""

    def __init__(self, folder: Path | None) -> None:
        """folder: None remembers nothing."""
        self._folder = folder
        self._names: dict[str, str] = {}
        self._noted: set[GraphKey] = set()
        self._lock = threading.Lock()

    def name(self, model: str, name: str) -> None:
        """What people call the model with this digest."""
        self._names[model] = name

    def note(self, key: GraphKey, program: HasRegions, seconds: float = 0.0) -> None:
        """A graph was met; written once in each process, and asked at every call."""
        if self._folder is None or key in self._noted:
            return
        with self._lock:
            self._noted.add(key)
            try:
                self._write(Remembered(key, program.region_keys, round(seconds, 3)))
            except OSError as error:
                logger.warning("Resolute: shapes are not remembered any more (%s)", error)
                self._folder = None

    def recall(self, model: str) -> tuple[Remembered, ...]:
        """The graphs that a model was used with, latest use last."""
        found = None if self._folder is None else _read(self._path(model))
        return () if found is None or found.digest != model else found.graphs

    def models(self) -> list[Model]:
        """Everything that is remembered, the model that was used last first."""
        files = [] if self._folder is None else sorted(self._folder.glob("*.json"))
        found = [model for file in files if (model := _read(file)) is not None and model.graphs]
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
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(_plain(Model(digest, name, (*kept, graph)))), "utf-8")
        os.replace(temporary, path)


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


def _read(path: Path) -> Model | None:
    try:
        data = json.loads(path.read_text("utf-8"))
        if data["format"] != FORMAT:
            return None
        regions = [str(key) for key in data["regions"]]
        digest = str(data["model"])
        graphs = [
            Remembered(
                _key(graph, digest),
                frozenset(regions[index] for index in graph["regions"]),
                float(graph["seconds"]),
                float(graph["used"]),
            )
            for graph in data["graphs"][-_MOST_GRAPHS:]
        ]
        return Model(digest, str(data["name"]), tuple(graphs))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        logger.info("Resolute: %s says nothing that could be understood (%s)", path.name, type(error).__name__)
        return None


def _key(graph: Any, model: str) -> GraphKey:
    tensors = tuple(
        (str(name), TensorSpec(tuple(int(size) for size in spec.pop("shape")), **spec))
        for name, spec in graph["tensors"]
    )
    signature = Signature(tensors, _components(graph["values"]))
    return GraphKey(signature, Role(graph["role"]), model, str(graph["backend"]), _components(graph["options"]))


def _components(data: Any) -> tuple[Component, ...]:
    return tuple((str(name), _literal(value)) for name, value in data)


def _literal(value: Any) -> Literal:
    if isinstance(value, list):
        return tuple(_literal(item) for item in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} is no part of a key")
