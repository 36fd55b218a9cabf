"""Why a call was new or was bypassed, in words: its difference from the signatures seen before. No torch."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from ..keys import COMPILED_NOW, Component, Literal, differing
from ..store.shape_history import UsedShape
from ..texts import Text

# Signatures kept for each module: more than the sizes of a day's work.
_MAX_SIGNATURES = 256

FIRST = "first graph of this module"
SINCE = "; since it last ran, torch's settings changed: "
FREED = "nothing differs: the graph was evicted or freed"
_DIFFERENCE = re.compile(r"(\S+) (batch|channels|height|width|tokens) (\d+) -> (\d+)")

# One-line meanings of bypasses for users, by code; docs/problems.md has the details.
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


class SeenSignatures:
    """The latest signatures that each module was called with."""

    def __init__(self) -> None:
        self._seen: dict[int, OrderedDict[Hashable, list[Component]]] = {}

    def add(self, owner: int, key: Hashable, components: list[Component]) -> str | None:
        """Record a signature. Returns None if it was seen before, else its difference from the nearest earlier one.

        owner: the module's number. components: the signature's, by name.
        """
        seen = self._seen.setdefault(owner, OrderedDict())
        if key in seen:
            seen.move_to_end(key)
            return None
        difference = explain_miss(components, seen.values())
        seen[key] = components
        if len(seen) > _MAX_SIGNATURES:
            seen.popitem(last=False)
        return difference

    def forget(self, owner: int) -> None:
        """Drop the signatures of a module that was garbage collected."""
        self._seen.pop(owner, None)


def explain_miss(wanted: list[Component], known: Iterable[list[Component]]) -> str:
    """Name what differs from the nearest known key: "context tokens 77 -> 154".

    The nearest key is the one with the fewest differences. Returns FIRST if no key is known, FREED if one is equal.
    """
    nearest = min((_differences(other, wanted) for other in known), key=len, default=None)
    if nearest is None:
        return FIRST
    if not nearest:
        return FREED
    more = f" and {len(nearest) - 3} more" if len(nearest) > 3 else ""
    return ", ".join(nearest[:3]) + more


def explain_first(known: Sequence[UsedShape], flags: Sequence[Component]) -> str:
    """Return FIRST and torch's flags that changed since the model last ran, perhaps in an earlier process: other flags
    recompile its regions. known: the graphs of the model, the last used one at the end.
    """
    then = known[-1].flags if known else ()
    changed = _differences(list(then), list(flags)) if then else []
    return f"{FIRST}{SINCE}{', '.join(changed)}" if changed else FIRST


def _differences(known: list[Component], wanted: list[Component]) -> list[str]:
    """Return a phrase per difference. A size that changed in several tensors, such as the batch, is one difference."""
    names, known_names = {name for name, _ in wanted}, {name for name, _ in known}
    phrases: dict[str, str] = {}
    for name, old, new in differing(known, wanted):
        if name not in known_names:
            if not _is_part(name, names - known_names):
                phrases[name] = f"{name} added"
        elif name not in names:
            if not _is_part(name, known_names - names):
                phrases[name] = f"{name} gone"
        elif name == "weights epoch":
            phrases[name] = "weights moved or changed"
        else:
            # "context batch" and "latent batch" change together, and so do the heights of one level.
            dimension = f"{name.rpartition(' ')[2]} {_short(old)} -> {_short(new)}"
            phrases.setdefault(dimension, f"{name} {_short(old)} -> {_short(new)}")
    return list(phrases.values())


def _is_part(name: str, others: set[str]) -> bool:
    """True if `name` is a part ("control.output[0] width") of one of the others ("control")."""
    parents = (name[:index] for index, character in enumerate(name) if character in ". [")
    return any(parent in others for parent in parents)


def _short(value: Literal) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def in_short(code: str) -> str:
    """Return the one-line meaning of a bypass code, or the code itself if it has none."""
    return BYPASSES.get(code, code)


def because(difference: str, cell: int) -> Text:
    """Return the reason why a call was new, in a user's words. difference: such as "latent height 15 -> 16". cell:
    pixels per side of a latent cell.
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
