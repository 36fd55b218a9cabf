"""Warm up a list of items one by one: skip what is ready, report what fails, and stop between two items on Cancel."""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import comfy.utils

from ....compile_cache.errors import UserError, first_line
from ....compile_cache.keys import CaptureKey, Role
from ....compile_cache.telemetry import rows
from ....compile_cache.texts import Text
from ....compile_cache.torch_compat.private_names import pytree
from ....compile_cache.warm_up_plan import FAILED, OVERLAP, READY, WARMED, Item, Outcome
from ..comfyui.messages import show_on_node
from ..patch.compiled_forward import CompiledForward
from ..process import runtime
from ..report import runs
from .predict import decode, encode, predict

logger = logging.getLogger(__name__)

MODEL, VAE, ENCODER = "model", "VAE", "encoder"
# Model patcher or VAE -> its finished tasks, and the captures that each used. ComfyUI passes the same object from
# prompt to prompt until a node upstream changes.
_warmed: weakref.WeakKeyDictionary[Any, dict[Hashable, set[CaptureKey]]] = weakref.WeakKeyDictionary()


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
    """Warm up every item, in the order of `items`. A failed item becomes an outcome, and the next items still run.

    Raises UserError if none of the connected inputs can be warmed up, and ComfyUI's InterruptProcessingException if the
    user cancels.
    """
    tasks = list(_tasks(inputs, items))
    if not tasks:
        raise UserError(" ".join(["Nothing can be warmed up.", *skipped_inputs(inputs)]))
    bar = comfy.utils.ProgressBar(len(tasks), node_id=node_id)
    outcomes = []
    try:
        for number, task in enumerate(tasks):
            comfy.model_management.throw_exception_if_processing_interrupted()
            text = Text(
                "warming {number} of {count}: {what} {item}",
                number=number + 1,
                count=len(tasks),
                what=task.what,
                item=task.item,
            )
            _say(text, node_id)
            outcomes.append(_run_task(task))
            bar.update(1)
    except comfy.model_management.InterruptProcessingException:
        _say(Text("warm-up stopped: {done} of {count} are done", done=len(outcomes), count=len(tasks)), node_id)
        raise
    counts = {state: sum(outcome.state == state for outcome in outcomes) for state in (READY, WARMED, FAILED)}
    text = Text("warm-up: {ready} ready, {warmed} warmed, {failed} failed", **counts)
    _say(text, node_id)
    return outcomes


def _say(text: Text, node_id: str | None) -> None:
    logger.info("Resolute: %s", text)
    show_on_node(text, node_id)


def skipped_inputs(inputs: WarmUpInputs) -> list[str]:
    """One sentence, with the reason and the remedy, for each connected input that is not warmed up."""
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
    key = (inputs.cfg != 1, _key_of(inputs.conditioning), _key_of(inputs.control_net))
    for item in items:
        if warms_model:
            arguments = (inputs.model, item, inputs.cfg, inputs.conditioning, inputs.control_net, inputs.vae)
            yield Task(MODEL, item, inputs.model, key, functools.partial(predict, *arguments))
        image = Item(item.size, item.batch)  # without chunks: decoding does not depend on the prompt's length
        if warms_vae and image not in decoded:
            decoded.add(image)
            tiles = (inputs.tile_size, inputs.overlap)
            yield Task(VAE, image, inputs.vae, tiles, functools.partial(decode, inputs.vae, image, *tiles))
            if _is_compiled(inputs.vae.patcher, Role.VAE_ENCODE):
                yield Task(ENCODER, image, inputs.vae, (), functools.partial(encode, inputs.vae, image))


def _run_task(task: Task) -> Outcome:
    """Run a task unless its captures are ready. Every failure except a cancellation becomes a FAILED outcome."""
    outcome = functools.partial(Outcome, str(task.item), task.what)
    known, key = _warmed.setdefault(task.owner, {}), (task.what, task.item, task.key)
    before = _captures()
    if key in known and known[key] <= before.keys():
        return outcome(READY, 0.0, sum(before[each][0] for each in known[key]), "nothing to do")
    mark, started = runtime.cache().stats.mark(), time.perf_counter()
    try:
        with runs.warming_up():
            task.run()
    except comfy.model_management.InterruptProcessingException:
        raise
    except Exception as error:
        comfy.model_management.soft_empty_cache()
        logger.warning("Resolute: warm-up of %s %s failed: %s", task.what, task.item, first_line(error))
        logger.debug("Resolute: traceback of the failed warm-up", exc_info=True)
        seconds = time.perf_counter() - started
        return outcome(FAILED, seconds, 0, f"{type(error).__name__}: {first_line(error)}")
    seconds = time.perf_counter() - started
    used = dict(_captures().items() - before.items())
    known[key] = set(used)
    changes = runtime.cache().stats.since(mark)
    work = [text for name, text in rows.counted(changes["counts"]).items() if changes["counts"][name]]
    detail = ", ".join([*work, *(f"bypassed: {code}" for code in changes["bypasses"])])
    return outcome(WARMED, seconds, sum(size for size, _ in used.values()), detail)


def _captures() -> dict[CaptureKey, tuple[int, int]]:
    """Bytes and hits of each existing capture. A capture that was made or replayed in between has another value."""
    return {key: (entry.bytes, entry.hits) for key, entry in runtime.cache().captured()}


def _warms_model(inputs: WarmUpInputs) -> bool:
    """True if there is a model and it or the ControlNet is compiled: an uncompiled model runs the ControlNet too."""
    control_patcher = getattr(inputs.control_net, "control_model_wrapped", None)
    return inputs.model is not None and (_is_compiled(inputs.model) or _is_compiled(control_patcher))


def _warms_vae(inputs: WarmUpInputs) -> bool:
    return inputs.vae is not None and _is_compiled(getattr(inputs.vae, "patcher", None))


def _is_compiled(patcher: Any, role: Role | None = None) -> bool:
    """True if a forward of the patcher is compiled in this role, or in any role if None."""
    patches = getattr(patcher, "object_patches", {}).values()
    return any(isinstance(patch, CompiledForward) and role in (None, patch.role) for patch in patches)


def _key_of(value: Any) -> Hashable:
    """The parts of an input that decide a call's signature: shapes of tensors, plain values, identities of objects."""
    leaves, structure = pytree.tree_flatten(value)
    return (str(structure), *map(_key_of_leaf, leaves))


def _key_of_leaf(value: Any) -> Hashable:
    if hasattr(value, "shape"):
        return tuple(value.shape)
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    try:
        reference = weakref.ref(value)  # not its `id`, which Python uses again once the object is collected
        hash(reference)
    except TypeError:  # equal to nothing, so it is warmed up again
        return object()
    return reference
