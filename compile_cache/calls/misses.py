"""Why there was no graph for a call: the signatures seen before, and in words what differs from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from ..keys import Component, Literal, differing
from ..store.shape_history import UsedShape

# Signatures kept for each module: more than a day's work has sizes.
_MAX_SIGNATURES = 256

FIRST = "first graph of this module"
SINCE = "; since it last ran, torch's settings changed: "
FREED = "nothing differs: the graph was evicted or freed"


class SeenSignatures:
    """The latest signatures that each module was called with."""

    def __init__(self) -> None:
        self._seen: dict[int, OrderedDict[Hashable, list[Component]]] = {}

    def add(self, owner: int, key: Hashable, components: list[Component]) -> str | None:
        """Returns None for a signature seen before, else in words what differs from the nearest one seen before.

        owner: the module's number. components: of the signature, by name.
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
        """The module was garbage collected."""
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
    """FIRST, with the flags of torch that changed since the model last ran, perhaps in an earlier process: its regions
    compile anew under other flags. known: the graphs of the model, the last used one at the end.
    """
    then = known[-1].flags if known else ()
    changed = _differences(list(then), list(flags)) if then else []
    return f"{FIRST}{SINCE}{', '.join(changed)}" if changed else FIRST


def _differences(known: list[Component], wanted: list[Component]) -> list[str]:
    """One phrase per difference. A size that changed in several tensors, such as the batch, is one difference."""
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
