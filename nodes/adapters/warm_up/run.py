"""Warm up a list of items one by one: skip what is ready, report what fails, and stop between two items on Cancel."""

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

from ....compile_cache.calls.recordings import RecordedCalls
from ....compile_cache.errors import UserError, first_line
from ....compile_cache.keys import Role
from ....compile_cache.texts import Text
from ....compile_cache.warm_up_plan import FAILED, OVERLAP, READY, WARMED, Item, Outcome
from ..comfyui.messages import broadcast
from ..comfyui.progress import NodeProgress
from ..forward.compiled_forward import CompiledForward
from ..process import runtime
from ..report import runs
from .predict import decode, encode, predict

logger = logging.getLogger(__name__)

MODEL, VAE, ENCODER = "model", "VAE", "encoder"
# Model patcher or VAE -> its finished tasks by key, and the cache entries that each used. ComfyUI passes the same
# object from prompt to prompt until a node upstream changes.
_warmed: weakref.WeakKeyDictionary[Any, dict[Hashable, RecordedCalls]] = weakref.WeakKeyDictionary()

_next_number = itertools.count(1)
_object_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class WarmUpInputs:
    """The connected inputs of a Warm Up node; None is not connected.

    conditioning: positive and negative; None uses dummies. tile_size, overlap: of the decoder, in pixels; tile_size 0
    decodes whole images.
    """

    model: Any = None
    vae: Any = None
    control_net: Any = None
    conditioning: tuple[Any, Any] | None = None
    cfg: float = 1.0
    tile_size: int = 0
    overlap: int = OVERLAP


def warm_up(inputs: WarmUpInputs, items: Sequence[Item], node_id: str | None = None) -> list[Outcome]:
    """Warm up every item, in the given order. A failed item becomes an outcome and the others go on.

    Raises UserError if none of the connected inputs can be warmed up, and ComfyUI's InterruptProcessingException if the
    user cancels.
    """
    tasks = list(_tasks(inputs, items))
    if not tasks:
        raise UserError(" ".join(["Nothing can be warmed up.", *skipped_inputs(inputs)]))
    progress = NodeProgress(node_id)
    bar = comfy.utils.ProgressBar(len(tasks), node_id=node_id)
    outcomes, started = [], time.perf_counter()
    for number, task in enumerate(tasks):
        progress.raise_if_cancelled()
        progress.report(number, len(tasks), _warming(task, number + 1, len(tasks)))
        outcomes.append(_run_task(task, progress))
        bar.update(1)
    counts = {state: sum(outcome.state == state for outcome in outcomes) for state in (READY, WARMED, FAILED)}
    text = Text("warm-up: {ready} ready, {warmed} warmed, {failed} failed", **counts)
    progress.report(len(tasks), len(tasks), text)
    ready = dict.fromkeys(outcome.item for outcome in outcomes if outcome.state != FAILED)
    broadcast("warmed", sizes=list(ready), took=time.perf_counter() - started)
    return outcomes


def _warming(task: Task, number: int, count: int) -> Text:
    text = "warming {number} of {count}: {what} {item}"
    return Text(text, number=number, count=count, what=task.what, item=task.item)


def skipped_inputs(inputs: WarmUpInputs) -> list[str]:
    """One sentence for each connected input that is not warmed up: why, and what to do."""
    sentences: list[str] = []
    if inputs.model is inputs.vae is inputs.control_net is None:
        sentences.append(Text("Connect the output of Compile Model or Compile VAE Decode."))
    if inputs.model is not None and not _warms_model(inputs):
        sentences.append(Text("The model is not compiled: put Compile Model before Warm Up."))
    if inputs.vae is not None and not _warms_vae(inputs):
        sentences.append(Text("The VAE is not compiled: put Compile VAE Decode before Warm Up."))
    if inputs.control_net is not None and inputs.model is None:
        sentences.append(Text("A ControlNet is warmed up together with a model: connect the model too."))
    return sentences


@dataclass(frozen=True)
class Task:
    """One model prediction, decode or encode. owner: the model patcher or VAE.

    key: everything else that decides which captures the task uses.
    """

    what: str
    item: Item
    owner: Any
    key: Hashable
    run: Callable[[], None]


def _tasks(inputs: WarmUpInputs, items: Sequence[Item]) -> Iterator[Task]:
    decoded = set()
    warms_model, warms_vae = _warms_model(inputs), _warms_vae(inputs)
    for item in items:
        if warms_model:
            conditioning_key = _conditioning_key(inputs.conditioning)
            key: Hashable = (MODEL, item, inputs.cfg != 1, conditioning_key, _object_number(inputs.control_net))
            arguments = (inputs.model, item, inputs.cfg, inputs.conditioning, inputs.control_net, inputs.vae)
            yield Task(MODEL, item, inputs.model, key, functools.partial(predict, *arguments))
        image = Item(item.size, item.batch)  # without chunks: decoding does not depend on the prompt's length
        if warms_vae and image not in decoded:
            decoded.add(image)
            key = (VAE, image, inputs.tile_size, inputs.overlap)
            run = functools.partial(decode, inputs.vae, image, inputs.tile_size, inputs.overlap)
            yield Task(VAE, image, inputs.vae, key, run)
            if _is_compiled(inputs.vae.patcher, Role.VAE_ENCODE):
                encoding = functools.partial(encode, inputs.vae, image)
                yield Task(ENCODER, image, inputs.vae, (ENCODER, image), encoding)


def _run_task(task: Task, progress: NodeProgress) -> Outcome:
    """Run a task unless its captures are ready. Every failure except a cancellation becomes a FAILED outcome."""
    cache = runtime.cache()
    known = _warmed.setdefault(task.owner, {})
    used = known.get(task.key)
    if used is not None and cache.has_captures(used):
        return Outcome(str(task.item), task.what, READY, 0.0, cache.bytes_of(used), "nothing to do")
    before = cache.stats.snapshot()
    started = time.perf_counter()
    try:
        with runs.warming_up(), cache.record_calls() as used:
            task.run()
    except progress.cancellations:
        raise
    except Exception as error:
        comfy.model_management.soft_empty_cache()
        logger.warning("Resolute: warm-up of %s %s failed: %s", task.what, task.item, first_line(error))
        logger.debug("Resolute: traceback of the failed warm-up", exc_info=True)
        seconds = time.perf_counter() - started
        return Outcome(str(task.item), task.what, FAILED, seconds, 0, f"{type(error).__name__}: {first_line(error)}")
    seconds = time.perf_counter() - started
    known[task.key] = used
    detail = _changes(before, cache.stats.snapshot())
    return Outcome(str(task.item), task.what, WARMED, seconds, cache.bytes_of(used), detail)


_COUNTER_TEXTS = {
    "region_compiles": "regions compiled",
    "region_loads": "regions loaded",
    "captures": "captured",
    "eager_calls": "eager calls",
}


def _changes(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The work of the cache between two snapshots of its counters, for example "2 regions compiled, 1 captured"."""
    parts = [f"{after[key] - before[key]} {text}" for key, text in _COUNTER_TEXTS.items() if after[key] > before[key]]
    bypasses = [code for code, count in after["bypasses"].items() if count > before["bypasses"].get(code, 0)]
    return ", ".join([*parts, *(f"bypassed: {code}" for code in bypasses)]) or "through compiled regions"


def _warms_model(inputs: WarmUpInputs) -> bool:
    """A compiled ControlNet is enough: a prediction of a model that is not compiled runs it too."""
    control_patcher = getattr(inputs.control_net, "control_model_wrapped", None)
    return inputs.model is not None and (_is_compiled(inputs.model) or _is_compiled(control_patcher))


def _warms_vae(inputs: WarmUpInputs) -> bool:
    return inputs.vae is not None and _is_compiled(getattr(inputs.vae, "patcher", None))


def _is_compiled(patcher: Any, role: Role | None = None) -> bool:
    """role: of the forward that is asked for; None: any."""
    patches = getattr(patcher, "object_patches", {}).values()
    return any(isinstance(patch, CompiledForward) and role in (None, patch.role) for patch in patches)


def _conditioning_key(conditioning: tuple[Any, Any] | None) -> Hashable:
    """All of a CONDITIONING that decides its signatures: shapes of tensors, and other values (areas, hooks)."""
    if conditioning is None:
        return None
    return tuple(
        (tuple(embedding.shape), tuple(sorted((name, _value_key(value)) for name, value in more.items())))
        for entries in conditioning
        for embedding, more in entries
    )


def _value_key(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"shape {tuple(value.shape)}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_value_key(each)}' for name, each in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value_key, value))}]"
    return repr(value) if isinstance(value, (bool, int, float, str)) else f"object {_object_number(value)}"


def _object_number(value: Any) -> int:
    """A number for this object. Not `id`, because Python uses an id again once its object is collected."""
    if value is None:
        return 0
    try:
        return _object_numbers.setdefault(value, next(_next_number))
    except TypeError:  # not hashable or not weakly referable: a new number each time, so it is warmed up again
        return next(_next_number)
