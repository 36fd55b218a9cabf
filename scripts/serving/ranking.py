"""The order of replicas for one prompt: what each has ready, bounded by how busy it is. No Ray, so tests call it."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Plain = Mapping[str, Any]


class Warmth(enum.IntEnum):
    """The part of a need that a replica has ready; more is better."""

    ANY = 0
    MODEL = 1  # the model files are loaded
    REGIONS = 2  # the compiled regions of these models are in memory
    CAPTURE = 3  # it ran this workflow with other seeds or texts, and what it made for that is still there


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica. load: prompts that it has. stats: what it reported, see `Replica.record_routing_stats`."""

    name: str
    load: int
    stats: Plain = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ranked:
    """Candidates in groups, the best first, and the warmth of each by name. Serve takes a group's least busy one."""

    groups: list[list[str]]
    warmth: dict[str, Warmth]
    too_busy: frozenset[str]  # more than the allowed imbalance behind the least busy one


def warmth(need: Plain, stats: Plain) -> Warmth:
    """The part of a need that a replica has. Unknown parts of the need are in no list, so they make nothing warm."""
    for level, wanted, ready in (
        (Warmth.CAPTURE, "shapes", "shapes"),
        (Warmth.REGIONS, "structures", "structures"),
        (Warmth.MODEL, "files", "files"),
    ):
        names, found = need.get(wanted) or (), stats.get(ready) or ()
        if names and all(name in found for name in names):  # a few names: a set of each report would cost more
            return level
    return Warmth.ANY


def rank(candidates: Sequence[Candidate], need: Plain, imbalance: int) -> Ranked:
    """Group replicas by warmth. Those with more than `imbalance` prompts above the least busy one come last.

    need: `Need.plain`, with three more fields. structures: digests of the models, if known from earlier runs. only: the
    replicas that may be chosen, if any is still there. avoid: those that come last because the prompt failed there.
    """
    only, avoid = set(need.get("only") or ()), set(need.get("avoid") or ())
    able = [each for each in candidates if each.name in only] or list(candidates)
    levels = {each.name: warmth(need, each.stats) for each in able}
    least = min((each.load for each in able), default=0)
    busy = frozenset(each.name for each in able if each.load - least > imbalance)
    groups: dict[tuple[bool, bool, bool, int, bool], list[Candidate]] = {}
    for each in able:
        has_files = warmth({"files": need.get("files")}, each.stats) is Warmth.MODEL
        unready = not each.stats.get("ready", True)
        # Past the imbalance only the load counts.
        level = 0 if each.name in busy else -levels[each.name]
        place = (each.name in avoid, unready, each.name in busy, level, not has_files and each.name not in busy)
        groups.setdefault(place, []).append(each)
    # Of replicas that are equally busy Serve takes the first: the one with the fewest shapes, so that they spread.
    ordered = [sorted(groups[place], key=_spread) for place in sorted(groups)]
    return Ranked([[each.name for each in group] for group in ordered], levels, busy)


def explain(ranked: Ranked, chosen: str, loads: Mapping[str, int]) -> str:
    """Why a replica was chosen, in a sentence for the header and the log."""
    level = ranked.warmth.get(chosen, Warmth.ANY)
    best = max(ranked.warmth.values(), default=Warmth.ANY)
    said = {
        Warmth.CAPTURE: "it ran this workflow",
        Warmth.REGIONS: "it has this model's regions",
        Warmth.MODEL: "it has the model files",
        Warmth.ANY: "nothing of it is warm anywhere",
    }[level]
    if level < best:
        warmer = sorted(name for name, each in ranked.warmth.items() if each == best)
        reason = "too busy" if set(warmer) <= ranked.too_busy else "full, restarting or refused it"
        said = f"{said if level else 'nothing of it is warm here'}; warmer but {reason}: {', '.join(warmer)}"
    return f"{level.name.lower()}: {said} ({loads.get(chosen, 0)} before it)"


def _spread(candidate: Candidate) -> tuple[int, int]:
    return candidate.load, len(candidate.stats.get("shapes") or ())
