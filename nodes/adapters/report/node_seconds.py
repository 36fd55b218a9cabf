"""The seconds of the nodes that sample and decode, for Compare Images: how long each of two pictures took.

ComfyUI tells handlers of its progress when a node begins and ends. A handler belongs to one prompt, so `begin` adds
ours when a prompt with Compare Images starts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from comfy_execution.progress import ProgressHandler, add_progress_handler, get_progress_state

import nodes

from ....compile_cache.calls.run_summary import time_text
from ....compile_cache.stats import SHORT_WAIT
from ....compile_cache.texts import Text
from ..process import runtime

_NAME = "resolute-seconds"
_MOST = 1000  # nodes that are remembered


@dataclass(frozen=True, slots=True)
class _Took:
    """Seconds of a node, of which it waited for compiles, loads and captures. inputs: as text, with its class."""

    seconds: float
    waited: float
    inputs: str
    prompt_id: str


_took: dict[str, _Took] = {}  # by node id; a node that ComfyUI has cached keeps that of its last run


class _Clock(ProgressHandler):
    def __init__(self) -> None:
        super().__init__(_NAME)
        self._started: dict[str, tuple[float, float]] = {}

    def start_handler(self, node_id: str, state: Any, prompt_id: str) -> None:
        self._started[node_id] = (time.perf_counter(), runtime.waiting_seconds())

    def finish_handler(self, node_id: str, state: Any, prompt_id: str) -> None:
        started = self._started.pop(node_id, None)
        if started is None:  # its result was cached
            return
        _took.pop(node_id, None)
        seconds, waited = time.perf_counter() - started[0], runtime.waiting_seconds() - started[1]
        _took[node_id] = _Took(seconds, waited, _inputs_of(node_id), prompt_id)
        if len(_took) > _MOST:
            del _took[next(iter(_took))]


def begin() -> None:
    """Note the seconds of the nodes of the prompt that starts now."""
    if _NAME not in get_progress_state().handlers:
        add_progress_handler(_Clock())


def comparison(node_id: str | None, first: str, second: str) -> Text | None:
    """Both times as a sentence: "Sampling and decode: A 1.1 s, B 3.2 s.".

    first, second: inputs of the node, of which each takes a picture. None where a picture was not sampled, or the
    seconds of a part of it are not known.
    """
    prompt = get_progress_state().dynprompt
    if node_id is None or not prompt.has_node(node_id):
        return None
    inputs = prompt.get_node(node_id).get("inputs", {})
    times = [_time_of(_upstream(inputs.get(name))) for name in (first, second)]
    if times[0] is None or times[1] is None:
        return None
    return Text("Sampling and decode: A {a}, B {b}.", a=times[0], b=times[1])


def _time_of(names: Iterable[str]) -> str | None:
    timed = [name for name in names if _samples_or_decodes(name)]
    found = [took for name in timed if (took := _took.get(name)) is not None and took.inputs == _inputs_of(name)]
    if not found or len(found) < len(timed):
        return None
    waited = sum(took.waited for took in found)
    text = time_text(sum(took.seconds for took in found))
    if waited >= SHORT_WAIT:
        text = Text("{time} ({waited} of these compiling or loading)", time=text, waited=time_text(waited))
    if all(took.prompt_id != get_progress_state().prompt_id for took in found):
        text = Text("{time} in an earlier prompt", time=text)
    return text


def _upstream(link: Any) -> list[str]:
    """Ids of the nodes that a link needs."""
    prompt, found = get_progress_state().dynprompt, list[str]()
    links = [link]
    while links:
        link = links.pop()
        if isinstance(link, list) and len(link) == 2 and link[0] not in found and prompt.has_node(link[0]):
            found.append(link[0])
            links += prompt.get_node(link[0]).get("inputs", {}).values()
    return found


def _samples_or_decodes(node_id: str) -> bool:
    """A node samples or decodes, by the inputs and outputs of its class, from any pack; as web/measure.js."""
    kind: Any = nodes.NODE_CLASS_MAPPINGS.get(get_progress_state().dynprompt.get_node(node_id)["class_type"])
    if kind is None:
        return False
    groups = kind.INPUT_TYPES()
    inputs = [each[0] for name in ("required", "optional") for each in groups.get(name, {}).values()]
    takes = {each for each in inputs if isinstance(each, str)}  # a list of choices is none
    gives = set(kind.RETURN_TYPES)
    return ("LATENT" in gives and bool(takes & {"MODEL", "GUIDER"})) or ("IMAGE" in gives and "VAE" in takes)


def _inputs_of(node_id: str) -> str:
    node = get_progress_state().dynprompt.get_node(node_id)
    return json.dumps([node["class_type"], node.get("inputs", {})], sort_keys=True, default=str)
