"""The models and shapes that a replica has ready: its prompts used them, and `GET /resolute/cache` still lists them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Plain = Mapping[str, Any]
Row = tuple[str, tuple[int, ...]]  # a model's structure and its latent's shape

_COUNTED = ("region_compiles", "region_loads", "captures")  # work that a warm prompt does not cause


class Readiness:
    """Learns from each prompt which shapes its workflow used, and forgets what the cache dropped."""

    def __init__(self) -> None:
        self._shapes: dict[str, frozenset[Row]] = {}  # a shape of `Need` -> rows of the cache that it needs
        self._structures: set[str] = set()
        self._files: tuple[str, ...] = ()
        self._expected: dict[str, Plain] = {}
        self._counters: dict[str, Any] = {}

    def expect(self, token: str, need: Plain) -> None:
        """A prompt is queued here, so its needs will be ready when the next one's turn comes."""
        self._expected[token] = need

    def forget(self, token: str) -> None:
        """A prompt is over."""
        self._expected.pop(token, None)

    def started_with(self, cache: Plain) -> None:
        """The models that the store knew when ComfyUI started: it loads their regions ahead."""
        self._structures |= {
            model["model"]
            for model in cache.get("models", ())
            if any(shape["state"] != "unknown" for shape in model["shapes"])
        }

    def ran(self, prompt_id: str, need: Plain, runs: Iterable[Plain], cache: Plain) -> dict[str, Any]:
        """Learn from a prompt that ended. Returns `structures` of its models, and whether it was `cold` and waited."""
        mine = [run for run in runs if run.get("prompt_id") == prompt_id]
        structures = {run["structure"] for run in mine if run.get("structure")} or set(need.get("structures") or ())
        used = {(run.get("structure"), _sides(run.get("size", ""))) for run in mine}
        rows = frozenset(row for row, size in _in_memory(cache) if (row[0], size) in used)
        if rows:
            self._shapes |= dict.fromkeys(need.get("shapes") or (), rows)
        self._structures |= structures
        self._files = tuple(need.get("files") or ())
        self.check(cache)
        counts = {name: sum(run.get("counts", {}).get(name, 0) for run in mine) for name in _COUNTED}
        waited = round(sum(run.get("waited", 0.0) for run in mine), 3)
        return {"structures": sorted(structures), "runs": len(mine), "waited": waited, **counts}

    def check(self, cache: Plain) -> None:
        """Forget shapes of which the cache dropped something: evicted, freed, or the weights moved."""
        left = {row for row, _ in _in_memory(cache)}
        self._shapes = {shape: rows for shape, rows in self._shapes.items() if rows <= left}
        self._counters = dict(cache.get("counters", {}))

    def plain(self) -> dict[str, Any]:
        """For the router, see `ranking.warmth`; and the counters that `GET /resolute/fleet` shows."""
        expected = list(self._expected.values())
        files = expected[-1].get("files") or () if expected else self._files
        counted = ("region_compiles", "region_loads", "captures", "replays", "stall_seconds")
        return {
            "shapes": sorted({*self._shapes, *_each(expected, "shapes")}),
            "structures": sorted({*self._structures, *_each(expected, "structures")}),
            "files": sorted(files),
            "counters": {name: self._counters[name] for name in counted if name in self._counters},
        }


def _in_memory(cache: Plain) -> Iterable[tuple[Row, str]]:
    """The rows of the cache, with their sides in pixels ("512x384")."""
    for model in cache.get("models", ()):
        for shape in model["shapes"]:
            if shape["state"] == "memory":
                yield (shape["model"], tuple(shape["latent_shape"])), _sides(shape["size"])


def _sides(size: str) -> str:
    """The sides in pixels of a size, without its batch."""
    return size.partition(",")[0]


def _each(needs: Sequence[Plain], name: str) -> set[str]:
    return {value for need in needs for value in need.get(name) or ()}
