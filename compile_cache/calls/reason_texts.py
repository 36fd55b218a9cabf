"""Why a call was new or was bypassed, in words for people. Plain data: no torch, no ComfyUI."""

from __future__ import annotations

import re

from ..keys import COMPILED_NOW
from ..texts import Text
from .misses import FIRST, FREED, SINCE

# What a bypass means to a user, by code, where one line has to do; docs/problems.md has the rest.
BYPASSES = {
    "observed_input": Text("Resolute does not know something in this call: no capture, or some blocks run eager"),
    "patched_block": Text("another node changes attention: some blocks run eager"),
    "replaced_forward": Text("another pack replaced code of this model: what uses that code runs eager"),
    "foreign_model": Text("another pack wrote a part of this model: no capture, and its blocks run eager"),
    "unreadable_weights": Text("weights that Resolute cannot follow: no capture, or their blocks run eager"),
    "streamed_weights": Text("weights are not all on the GPU: no capture"),
    "no_regions": Text("this model has no blocks that Resolute knows"),
    "compile_failed": Text("some blocks could not be compiled"),
    "capture_failed": Text("this call cannot be captured"),
    "out_of_memory": Text("memory ran out: no capture"),
    "over_budget": Text("a capture would take more memory than captures may"),
    "core_compiler": Text("ComfyUI's own compiler was at work"),
    "gradient": Text("gradients are on (training)"),
    "not_faster": Text("compiled code was not faster on this device, or this is being measured"),
    "left_out": Text("the blocks that you left out run eager"),
}
_DIFFERENCE = re.compile(r"(\S+) (batch|channels|height|width|tokens) (\d+) -> (\d+)")


def in_short(code: str) -> str:
    """The meaning of a bypass, by its code."""
    return BYPASSES.get(code, code)


def because(difference: str, cell: int) -> Text:
    """The reason why a call was new, in a user's words. difference: from `misses`, as "latent height 15 -> 16".

    cell: pixels to a side of one latent cell.
    """
    _, since, changes = difference.partition(SINCE)
    if since:
        return Text("torch's settings changed since this model last ran: {changes}", changes=changes)
    if difference == FIRST:
        return Text("the first run of this model since it was loaded")
    if difference == FREED:
        return Text("its capture had been freed or evicted")
    if difference == COMPILED_NOW:
        return Text("its blocks are compiled now")
    if difference == "remembered":
        return Text("an earlier session used this size")
    if "weights moved or changed" in difference:
        return Text("the weights were moved or changed, by a LoRA or by ComfyUI's memory management")
    return Text.joined(" and ", dict.fromkeys(_in_words(part, cell) for part in difference.split(", ")))


def _in_words(difference: str, cell: int) -> str:
    match = _DIFFERENCE.fullmatch(difference)
    if match is None:
        return difference
    tensor, dimension, old, new = match.groups()
    if tensor == "latent" and dimension in ("height", "width"):
        pixels = {"old": int(old) * cell, "new": int(new) * cell}
        if dimension == "height":
            return Text("the height changed from {old} to {new} pixels", **pixels)
        return Text("the width changed from {old} to {new} pixels", **pixels)
    if dimension == "batch":
        return Text("the batch changed from {old} to {new}", old=old, new=new)
    if tensor == "context" and dimension == "tokens":
        return Text("the prompt's length changed from {old} to {new} tokens", old=old, new=new)
    return difference
