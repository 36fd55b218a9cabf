"""Warm up item by item: what is ready is skipped, what fails is told, and Cancel stops between two items."""

from __future__ import annotations

import functools
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import comfy.utils

from ....compile_cache.cache import Used
from ....compile_cache.errors import UserError, first_line
from ....compile_cache.warm_up_plan import FAILED, READY, WARMED, Item, Outcome
from ..comfyui.progress import NodeProgress
from ..forward.compiled_forward import CompiledForward
from ..process import runtime
from .predict import decode, predict

logger = logging.getLogger(__name__)

MODEL, VAE = "model", "VAE"
_NOTHING = "Nothing that is connected can be warmed up."

# By model patcher and by VAE: ComfyUI hands out the same object until something before the node changes.
_warmed: weakref.WeakKeyDictionary[Any, dict[Hashable, Used]] = weakref.WeakKeyDictionary()

_numbers = itertools.count(1)
_numbered: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Subjects:
    """What is connected. texts: positive and negative, or None to make them up. tile_size, overlap: of the VAE, in
    pixels; 0 is no tiles.
    """

    model: Any = None
    vae: Any = None
    control_net: Any = None
    texts: tuple[Any, Any] | None = None
    cfg: float = 1.0
    tile_size: int = 0
    overlap: int = 64


def warm_up(subjects: Subjects, items: Sequence[Item], node_id: str | None = None) -> list[Outcome]:
    """Make every item ready, in the order given. Raises UserError where nothing that is connected can be warmed up, and
    ComfyUI's own interruption when the user cancels; any other failure is an outcome.
    """
    tasks = list(_tasks(subjects, items))
    if not tasks:
        raise UserError(" ".join([_NOTHING, *left_out(subjects)]))
    progress = NodeProgress(node_id)
    bar = comfy.utils.ProgressBar(len(tasks), node_id=node_id)
    outcomes = []
    for number, task in enumerate(tasks):
        progress.raise_if_cancelled()
        progress.report(number, len(tasks), f"warming {number + 1} of {len(tasks)}: {task.what} {task.item}")
        outcomes.append(_done(task, progress))
        bar.update(1)
    counts = ", ".join(f"{sum(o.state == state for o in outcomes)} {state}" for state in (READY, WARMED, FAILED))
    progress.report(len(tasks), len(tasks), f"warm-up: {counts}")
    return outcomes


def left_out(subjects: Subjects) -> list[str]:
    """A sentence for each thing that is connected and not warmed up: why, and what to do."""
    told = []
    if subjects.model is subjects.vae is subjects.control_net is None:
        told.append("Connect what comes out of Compile Model or Compile VAE Decode.")
    if subjects.model is not None and not _samples(subjects):
        told.append("The model is not compiled: put Compile Model before Warm Up.")
    if subjects.vae is not None and not _decodes(subjects):
        told.append("The VAE is not compiled: put Compile VAE Decode before Warm Up.")
    if subjects.control_net is not None and subjects.model is None:
        told.append("A ControlNet is warmed up together with a model: connect the model too.")
    return told


@dataclass(frozen=True)
class Task:
    what: str
    item: Item
    subject: Any
    about: Hashable  # what else decides which graphs it meets
    run: Callable[[], None]


def _tasks(subjects: Subjects, items: Sequence[Item]) -> Iterator[Task]:
    decoded = set()
    samples, decodes = _samples(subjects), _decodes(subjects)
    for item in items:
        if samples:
            about: Hashable = (MODEL, item, subjects.cfg != 1, _form(subjects.texts), _number(subjects.control_net))
            inputs = (subjects.model, item, subjects.cfg, subjects.texts, subjects.control_net, subjects.vae)
            yield Task(MODEL, item, subjects.model, about, functools.partial(predict, *inputs))
        picture = Item(item.size, item.batch)  # a decoder knows no text
        if decodes and picture not in decoded:
            decoded.add(picture)
            about = (VAE, picture, subjects.tile_size, subjects.overlap)
            run = functools.partial(decode, subjects.vae, picture, subjects.tile_size, subjects.overlap)
            yield Task(VAE, picture, subjects.vae, about, run)


def _done(task: Task, progress: NodeProgress) -> Outcome:
    cache = runtime.cache()
    known = _warmed.setdefault(task.subject, {})
    used = known.get(task.about)
    if used is not None and cache.still_ready(used):
        return Outcome(str(task.item), task.what, READY, 0.0, cache.bytes_of(used), "nothing to do")
    before = cache.stats.snapshot()
    started = time.perf_counter()
    try:
        with cache.watching() as used:
            task.run()
    except progress.cancellations:
        raise
    except Exception as error:
        comfy.model_management.soft_empty_cache()
        logger.warning("Resolute: warm-up of %s %s failed: %s", task.what, task.item, first_line(error))
        logger.debug("Resolute: how it failed", exc_info=True)
        seconds = time.perf_counter() - started
        return Outcome(str(task.item), task.what, FAILED, seconds, 0, f"{type(error).__name__}: {first_line(error)}")
    seconds = time.perf_counter() - started
    known[task.about] = used
    told = _told(before, cache.stats.snapshot())
    return Outcome(str(task.item), task.what, WARMED, seconds, cache.bytes_of(used), told)


_COUNTED = {
    "region_compiles": "regions compiled",
    "region_loads": "regions loaded",
    "captures": "captured",
    "eager_calls": "eager calls",
}


def _told(before: dict[str, Any], after: dict[str, Any]) -> str:
    parts = [f"{after[key] - before[key]} {text}" for key, text in _COUNTED.items() if after[key] > before[key]]
    bypasses = [code for code, count in after["bypasses"].items() if count > before["bypasses"].get(code, 0)]
    return ", ".join([*parts, *(f"bypassed: {code}" for code in bypasses)]) or "through compiled regions"


def _samples(subjects: Subjects) -> bool:
    network = getattr(subjects.control_net, "control_model_wrapped", None)
    return subjects.model is not None and (_is_compiled(subjects.model) or _is_compiled(network))


def _decodes(subjects: Subjects) -> bool:
    return subjects.vae is not None and _is_compiled(getattr(subjects.vae, "patcher", None))


def _is_compiled(patcher: Any) -> bool:
    patches = getattr(patcher, "object_patches", {})
    return any(isinstance(patch, CompiledForward) for patch in patches.values())


def _form(texts: tuple[Any, Any] | None) -> Hashable:
    """What of the texts decides which graphs they meet: shapes, and whatever else is said beside them."""
    if texts is None:
        return None
    return tuple(
        (tuple(embedding.shape), tuple(sorted((name, _plain(value)) for name, value in more.items())))
        for text in texts
        for embedding, more in text
    )


def _plain(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"shape {tuple(value.shape)}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_plain(each)}' for name, each in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_plain, value))}]"
    return repr(value) if isinstance(value, (bool, int, float, str)) else f"object {_number(value)}"


def _number(value: Any) -> int:
    """One for each object, and never given twice, as `id` would be once an object is gone."""
    if value is None:
        return 0
    try:
        return _numbered.setdefault(value, next(_numbers))
    except TypeError:  # it cannot be told from its successor, so what has it is warmed up again
        return next(_numbers)
