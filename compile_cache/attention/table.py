"""Which attention kernel each shape runs, kept on disk: two starts of ComfyUI compute the same picture.

    FOLDER/<machine>.json    the machine, and for each shape its kernel and what was measured, the oldest first

A table is valid for one GPU, driver, torch and cuDNN. A file that is damaged or of another format is ignored.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from math import log2
from pathlib import Path
from typing import Any

import torch

from ..keys import digest
from ..store.artifact_store import InvalidArtifactError, parse_json, read_regular_file
from ..store.private_files import make_private, write_file
from ..torch_facts.private_names import driver_version
from .kernels import FLASH_3, Given, switches

logger = logging.getLogger(__name__)

FORMAT = 2
_MOST = 1024  # shapes
_NEAR = 1.0  # a power of two: a measured token count within a factor of 2 serves its neighbours


@dataclass(frozen=True)
class Shape:
    """A call of attention. q, k: (batch, heads, tokens, width). switches: see `kernels.switches`.

    mask: its shape, as it is given; empty for none.
    """

    dtype: str
    q: tuple[int, ...]
    k: tuple[int, ...]
    v_width: int
    switches: tuple[bool, ...]
    mask: tuple[int, ...] = ()
    mask_dtype: str = ""

    def distance(self, other: Shape) -> float:
        """The power of two by which the tokens differ, of queries or of keys; infinite for another kind of call."""
        if self._kind() != other._kind():
            return float("inf")
        pairs = ((self.q[2], other.q[2]), (self.k[2], other.k[2]))
        return max(abs(log2(a / b)) if a and b else float(a != b) * 99 for a, b in pairs)

    def _kind(self) -> tuple[object, ...]:
        shared = tuple(size == 1 for size in self.mask)  # by the batch, all heads, all queries, all keys
        sizes = (self.q[:2], self.q[3], self.k[:2], self.k[3], self.v_width)
        return self.dtype, sizes, self.switches, self.mask_dtype, shared


def shape_of(given: Given) -> Shape:
    q, k, v, mask, _, _ = given  # groups show in the heads of q and k
    of_mask = () if mask is None else (tuple(mask.shape), str(mask.dtype))
    return Shape(str(q.dtype), tuple(q.shape), tuple(k.shape), int(v.shape[-1]), switches(), *of_mask)


@dataclass(frozen=True)
class Choice:
    """kernel: its name, "torch" for what torch chooses itself. failed: why a kernel cannot run, by its name.

    like: the tokens (queries, keys) of the shape that was measured, if that was another one.
    """

    kernel: str = "torch"
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    like: tuple[int, int] | None = None


def machine_of(device: torch.device) -> tuple[str, ...]:
    """The machine and the versions that the times of kernels depend on, beside the shape."""
    if device.type != "cuda":
        return (device.type, str(torch.__version__))
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    versions = (driver_version(), torch.__version__, torch.version.cuda, cudnn)
    return (name, str(capability), *map(str, versions), "flash 3" if find_spec(FLASH_3) is not None else "")


class ChoiceTable:
    """The choices of one machine. Thread-safe. Raises nothing: without its file it is empty."""

    def __init__(self, folder: Path | None, machine: tuple[str, ...]) -> None:
        """folder: None keeps nothing on disk."""
        self._path = None if folder is None else folder / f"{digest(machine)[:16]}.json"
        self._machine = machine
        self._lock = threading.Lock()
        self._choices: dict[Shape, Choice] = self._read()

    def get(self, shape: Shape) -> Choice | None:
        return self._choices.get(shape)

    def near(self, shape: Shape) -> tuple[Shape, Choice] | None:
        """The measured shape that is nearest to this one, if it is near enough to run the same kernel."""
        measured = [(shape.distance(each), each, choice) for each, choice in self if choice.like is None]
        distance, nearest, choice = min(measured, key=lambda found: found[0], default=(float("inf"), None, None))
        return (nearest, choice) if distance <= _NEAR and nearest is not None and choice is not None else None

    def set(self, shape: Shape, choice: Choice) -> None:
        """The oldest shape goes if there are too many."""
        with self._lock:
            self._choices.pop(shape, None)
            self._choices[shape] = choice
            while len(self._choices) > _MOST:
                self._choices.pop(next(iter(self._choices)))
            self._write()

    def __iter__(self) -> Iterator[tuple[Shape, Choice]]:
        return iter(list(self._choices.items()))

    def _write(self) -> None:
        if self._path is None:
            return
        shapes = [{**asdict(shape), **asdict(choice)} for shape, choice in self]
        try:
            make_private(self._path.parent)
            text = json.dumps({"format": FORMAT, "machine": self._machine, "shapes": shapes}, indent=1)
            write_file(self._path, text.encode())
        except OSError as error:
            logger.warning("Resolute: the choices of attention kernels were not stored: %s", error)

    def _read(self) -> dict[Shape, Choice]:
        if self._path is None:
            return {}
        try:
            data = parse_json(read_regular_file(self._path))
            if data["format"] != FORMAT or tuple(data["machine"]) != self._machine:
                return {}
            return dict(_entry(each) for each in data["shapes"][-_MOST:])
        except FileNotFoundError:
            return {}
        except (OSError, InvalidArtifactError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("Resolute: the choices of attention kernels in %s are ignored: %s", self._path.name, error)
            return {}


def _entry(data: Any) -> tuple[Shape, Choice]:
    """Raises ValueError, KeyError, TypeError or AttributeError for what no table writes."""
    q, k = (_whole(data[name], 4) for name in ("q", "k"))
    mask = _whole(data["mask"], 4 if data["mask"] else 0)
    shape = Shape(
        _text(data["dtype"]), q, k, _whole([data["v_width"]], 1)[0], tuple(map(bool, data["switches"])),
        mask, _text(data["mask_dtype"]),
    )  # fmt: skip
    milliseconds = {_text(name): float(value) for name, value in data["milliseconds"].items()}
    failed = {_text(name): _text(why) for name, why in data["failed"].items()}
    like = None if data["like"] is None else _whole(data["like"], 2)
    return shape, Choice(_text(data["kernel"]), milliseconds, failed, None if like is None else (like[0], like[1]))


def _whole(values: Any, count: int) -> tuple[int, ...]:
    if len(values) != count or not all(type(each) is int and 0 <= each < 1 << 40 for each in values):
        raise ValueError(f"{values!r:.80} are not {count} sizes")
    return tuple(values)


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 1000:
        raise ValueError(f"{value!r:.80} is not a short text")
    return value
