"""What `POST /resolute/warm-up` was asked for, as a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ....compile_cache.errors import UserError
from ....compile_cache.warm_up_plan import plan
from ..scan.pictures import image_size
from ..scan.workflow import scan
from .prompt import WARM_UP, warm_up_prompt

_DEFAULTS: dict[str, Any] = {"batch_sizes": "1", "prompt_chunks": "1", "cfg": 7.0, "backend": "auto", "vae": True}


@dataclass(frozen=True, slots=True)
class Wanted:
    """prompt: to be queued; items: what it will warm, a line each; unknown: what cannot be told, or is left out."""

    prompt: Mapping[str, Mapping[str, Any]]
    items: list[str]
    unknown: list[str]


def wanted(body: Mapping[str, Any]) -> Wanted:
    """Raises UserError for a request that cannot be served.

    body: {"prompt": a workflow in API form}, or {"plan": {"checkpoint": file, "sizes": "1024x1024, 720x960"}} with, if
    need be, "batch_sizes" ("1"), "prompt_chunks" ("1"), "cfg" (7.0), "backend" ("auto") and "vae" (true).
    """
    if ("prompt" in body) == ("plan" in body):
        raise UserError('Send either "prompt", a workflow in API form, or "plan", a checkpoint and its sizes.')
    if "prompt" in body:
        found = scan(body["prompt"], image_size=image_size)
        made = warm_up_prompt(body["prompt"], found)
        return Wanted(made.prompt, _items(made.prompt[name] for name in made.added), [*found.unknown, *made.notes])
    prompt = _planned(body["plan"])
    return Wanted(prompt, _items([prompt["warm"]]), [])


def _planned(asked: Any) -> Mapping[str, Mapping[str, Any]]:
    if not isinstance(asked, Mapping) or not all(isinstance(asked.get(name), str) for name in ("checkpoint", "sizes")):
        raise UserError('A plan needs "checkpoint", the name of the file, and "sizes", such as "1024x1024, 720x960".')
    unknown = sorted(set(asked) - {"checkpoint", "sizes", *_DEFAULTS})
    if unknown:
        raise UserError(
            f"A plan has no '{unknown[0]}'. Besides checkpoint and sizes it may have {', '.join(_DEFAULTS)}."
        )
    given = {**_DEFAULTS, **asked}
    if not isinstance(given["vae"], bool):
        raise UserError(f'A plan\'s "vae" is true or false, not {given["vae"]!r}.')
    plan(given["sizes"], str(given["batch_sizes"]), str(given["prompt_chunks"]))  # refused here, not in the queue
    lists = {name: str(given[name]) for name in ("sizes", "batch_sizes", "prompt_chunks")}
    links: dict[str, Any] = {"model": ["load", 0], **({"vae": ["load", 2]} if given["vae"] else {})}
    load = {"ckpt_name": given["checkpoint"], "backend": given["backend"], "compile_vae": given["vae"]}
    return {
        "load": {"class_type": "ResoluteLoadCheckpoint", "inputs": load},
        "warm": {"class_type": WARM_UP, "inputs": {**links, **lists, "cfg": given["cfg"]}},
    }


def _items(nodes: Iterable[Mapping[str, Any]]) -> list[str]:
    """One line per shape and subject of Warm Up nodes that were built here, in the order in which they are warmed."""
    lines = []
    for node in nodes:
        inputs = node["inputs"]
        texts = None if "positive" in inputs else inputs["prompt_chunks"]
        what = " and ".join(name for name in ("model", "vae") if name in inputs)
        tiles = f" in tiles of {inputs['tile_size']}" if inputs.get("tile_size") else ""
        lines += [f"{item}: {what}{tiles}" for item in plan(inputs["sizes"], inputs["batch_sizes"], texts)]
    return lines
