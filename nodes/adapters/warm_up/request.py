"""Turn the body of `POST /resolute/warm-up` into a prompt that ComfyUI can queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....compile_cache.errors import UserError, excerpt
from ....compile_cache.warm_up_plan import CFG, MAX_CFG, Item, plan
from .prompt import warm_up_prompt
from .request_limits import MAX_FIELD, MAX_NODES

_MAX_COPIES = 10 * MAX_NODES  # nodes of a workflow, once for each size that is asked for
_DEFAULTS: dict[str, Any] = {"batch_sizes": "1", "prompt_chunks": "1", "cfg": CFG, "backend": "auto", "vae": True}


@dataclass(frozen=True, slots=True)
class WarmUpRequest:
    """prompt: in API form, ready to queue. unknown: one sentence, with the reason, for each part of the workflow that
    is left out or compiles nothing.
    """

    prompt: Mapping[str, Mapping[str, Any]]
    unknown: list[str]


def parse_request(body: Mapping[str, Any], classes: Mapping[str, Any]) -> WarmUpRequest:
    """Build the prompt for a request. Raises UserError if the request is invalid or has nothing to warm up.

    body: either {"prompt": a workflow in API form} or {"plan": {"checkpoint": file, "sizes": "1024x1024, 720x960"}}.
    With a workflow, "sizes" and "batch_sizes" ("1") may replace its own. A plan may also have "batch_sizes" ("1"),
    "prompt_chunks" ("1"), "cfg" (7.0), "backend" ("auto") and "vae" (true). classes: ComfyUI's node classes, by id.
    """
    if ("prompt" in body) == ("plan" in body):
        raise UserError('Send either "prompt" (a workflow in API form) or "plan" (a checkpoint and its sizes).')
    if "prompt" in body:
        if isinstance(body["prompt"], Mapping) and len(body["prompt"]) > MAX_NODES:
            nodes = len(body["prompt"])
            raise UserError(f"The workflow has {nodes} nodes, and may have {MAX_NODES}. Send parts of it one by one.")
        asked = _asked_sizes(body)
        if isinstance(body["prompt"], Mapping) and len(asked) * len(body["prompt"]) > _MAX_COPIES:
            raise UserError(f"{len(asked)} sizes are too many for a workflow of this length. Send them one by one.")
        built = warm_up_prompt(body["prompt"], classes, asked)
        return WarmUpRequest(built.prompt, list(built.warnings))
    prompt = _prompt_for_plan(body["plan"])
    inputs = prompt["warm"]["inputs"]
    # Validate here too, so that the client gets the error as its answer and not a prompt that fails later.
    plan(inputs["sizes"], inputs["batch_sizes"], inputs["prompt_chunks"])
    return WarmUpRequest(prompt, [])


def _asked_sizes(body: Mapping[str, Any]) -> list[Item]:
    """The sizes at which to warm up a workflow, the largest first. Empty: the workflow's own sizes."""
    sizes, batches = body.get("sizes"), body.get("batch_sizes", "1")
    if sizes is None and "batch_sizes" not in body:
        return []
    if not all(isinstance(each, str) and len(each) <= MAX_FIELD for each in (sizes, batches)):
        raise UserError(
            f'"sizes" and "batch_sizes" must be texts of up to {MAX_FIELD} characters, as "720x960, 64x64".'
        )
    return plan(str(sizes), batches, None)


def _prompt_for_plan(given: Any) -> Mapping[str, Mapping[str, Any]]:
    if not isinstance(given, Mapping) or not all(isinstance(given.get(name), str) for name in ("checkpoint", "sizes")):
        raise UserError('A plan needs "checkpoint" (a file name) and "sizes", for example "1024x1024, 720x960".')
    unknown = sorted(set(given) - {"checkpoint", "sizes", *_DEFAULTS})
    if unknown:
        raise UserError(
            f"A plan has no '{excerpt(unknown[0])}'. Its fields are checkpoint, sizes, {', '.join(_DEFAULTS)}."
        )
    values = {**_DEFAULTS, **given}
    if not isinstance(values["vae"], bool):
        raise UserError(f'"vae" of a plan must be true or false, not {excerpt(repr(values["vae"]))}.')
    _check_fields(values)
    lists = {name: str(values[name]) for name in ("sizes", "batch_sizes", "prompt_chunks")}
    links: dict[str, Any] = {"model": ["load", 0], **({"vae": ["load", 2]} if values["vae"] else {})}
    load = {"ckpt_name": values["checkpoint"], "backend": values["backend"], "compile_vae": values["vae"]}
    return {
        "load": {"class_type": "ResoluteLoadCheckpoint", "inputs": load},
        "warm": {"class_type": "ResoluteWarmUp", "inputs": {**links, **lists, "cfg": values["cfg"]}},
    }


def _check_fields(values: Mapping[str, Any]) -> None:
    """Raises UserError for a field of a plan that no Warm Up node could use."""
    for name in ("checkpoint", "sizes", "batch_sizes", "prompt_chunks"):
        if len(str(values[name])) > MAX_FIELD:
            raise UserError(f'"{name}" of a plan may have {MAX_FIELD} characters. Send several plans.')
    if not isinstance(values["backend"], str):
        raise UserError(f'"backend" of a plan must be a name, such as "auto", not {excerpt(values["backend"])}.')
    cfg = values["cfg"]
    if isinstance(cfg, bool) or not isinstance(cfg, (int, float)) or not 0 <= cfg <= MAX_CFG:  # refuses NaN too
        raise UserError(f'"cfg" of a plan must be a number from 0 to {MAX_CFG:g}, not {excerpt(cfg)}.')
