"""DeepCache in one sampling run: it keeps features, and decides the pass of each call of the model.

The step of a call follows from its noise level; predictions are counted instead only for samplers known to make exactly
one in each step. So samplers that call the model several times a step, conds that are split or merged, and guidance
that adds calls all work. A feature belongs to one cond: a call runs in full if one of its conds has no feature from
the step that it needs.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..comfyui.transformer_options import (
    COND_ORDER,
    CONTEXT_WINDOW,
    EVOLVED_WINDOW,
    PATCHES,
    REPLACEMENTS,
    SIGMAS,
    UUIDS,
)
from .passes import Fast, Full
from .schedule import Plan, step_of

# Samplers that evaluate the next noise level too (heun, heunpp2) alternate between the features of two full steps.
_MAX_KEPT_STEPS = 2


@dataclass(frozen=True, slots=True, eq=False)
class Feature:
    """The part of a kept feature that belongs to one cond: number `part` of `parts` along the batch."""

    whole: torch.Tensor
    part: int
    parts: int

    def tensor(self) -> torch.Tensor:
        return self.whole.chunk(self.parts)[self.part]


class DeepCacheRun:
    """The state of DeepCache in one sampling run. Thread-safe: with conds split over several GPUs, core calls the model
    from one thread for each.
    """

    def __init__(self, plan: Plan, depth: int, sigmas: Sequence[float], one_prediction_a_step: bool = False) -> None:
        """sigmas: the sampler's schedule, one more than there are steps. one_prediction_a_step: if True, the number of
        predictions gives the step. The noise level always does, but reading it waits for the GPU.
        """
        self.passes: Counter[str] = Counter(full=0, fast=0)  # the number of runs of each pass
        self._plan = plan
        self._depth = depth
        self._sigmas = list(sigmas)
        self._keeps = plan.keeps
        self._features: dict[int, dict[Hashable, Feature]] = {}  # by the step that made them, last used last
        self._repeats: Counter[Hashable] = Counter()
        self._level: tuple[Any, float] = (None, 0.0)
        self._counts = one_prediction_a_step
        self._predictions = 0
        self._lock = threading.Lock()

    def begin_evaluation(self) -> None:
        """The sampler asks for one prediction; guidance may call the model several times for the same cond."""
        with self._lock:
            self._repeats.clear()
            self._predictions += 1

    def decide(self, latent: torch.Tensor, options: Mapping[str, Any]) -> Full | Fast | None:
        """The pass for a call of the model with `latent` (batch first), or None if its noise level is unknown."""
        if options.get(SIGMAS) is None:
            return None
        with self._lock:
            step = self._step(options[SIGMAS])
            chunks = self._chunks(latent, options)
            source = self._plan.sources[step]
            if source is not None:
                feature = self._assembled(source, chunks)
                if feature is not None:
                    return Fast(self._depth, feature, self.passes)
        wanted = step if source is None and step in self._keeps else source
        if wanted is None or not chunks:
            return Full(self._depth, None, self.passes)
        return Full(self._depth, lambda feature: self._keep(wanted, chunks, feature), self.passes)

    def close(self) -> None:
        """Free every feature."""
        with self._lock:
            self._features.clear()
            self._level = (None, 0.0)

    def _step(self, sigmas: Any) -> int:
        if self._counts and 0 < self._predictions < len(self._sigmas):
            return self._predictions - 1
        return step_of(self._sigma(sigmas), self._sigmas)

    def _sigma(self, sigmas: Any) -> float:
        # Reading a value waits for the GPU, so read it once for all calls with the same tensor.
        if self._level[0] is not sigmas:
            level = float(torch.as_tensor(sigmas).flatten()[0])
            if level != self._level[1]:
                self._repeats.clear()  # for a guider that bypasses `begin_evaluation`
            self._level = (sigmas, level)
        return self._level[1]

    def _chunks(self, latent: torch.Tensor, options: Mapping[str, Any]) -> list[Hashable]:
        """A key for the cond of each part of the batch; empty if ComfyUI does not identify the conds."""
        uuids, sides = options.get(UUIDS), options.get(COND_ORDER)
        if not uuids or not sides or len(uuids) != len(sides):
            return []
        conditions: list[Hashable] = list(zip(uuids, sides, strict=True))
        if latent.shape[0] % len(conditions):  # a batch made by another pack: one cond for all of it
            conditions = [tuple(conditions)]
        about = (
            latent.shape[0] // len(conditions),
            tuple(latent.shape[1:]),
            latent.dtype,
            latent.device,
            _frames(options),
            _patched(options),
        )
        chunks: list[Hashable] = []
        for condition in conditions:
            identity = (condition, about)
            chunks.append((identity, self._repeats[identity]))
            self._repeats[identity] += 1
        return chunks

    def _assembled(self, source: int, chunks: Sequence[Hashable]) -> torch.Tensor | None:
        kept = self._features.get(source, {})
        found = [kept[chunk] for chunk in chunks if chunk in kept]
        if not chunks or len(found) < len(chunks):
            return None
        self._features[source] = self._features.pop(source)
        whole = found[0].whole
        if all(feature.whole is whole for feature in found) and [f.part for f in found] == list(range(found[0].parts)):
            return whole
        return torch.cat([feature.tensor() for feature in found])

    def _keep(self, step: int, chunks: Sequence[Hashable], feature: torch.Tensor) -> None:
        with self._lock:
            kept = self._features.pop(step, {})
            self._features[step] = kept
            for part, chunk in enumerate(chunks):
                kept[chunk] = Feature(feature, part, len(chunks))
            while len(self._features) > _MAX_KEPT_STEPS:
                self._features.pop(next(iter(self._features)))


def _frames(options: Mapping[str, Any]) -> Hashable:
    """The frames of a long video that a call covers: core's context windows, or AnimateDiff-Evolved's."""
    window = getattr(options.get(CONTEXT_WINDOW), "index_list", None)
    evolved = options.get(EVOLVED_WINDOW)
    frames = evolved.get("sub_idxs") if isinstance(evolved, Mapping) else None
    return tuple(tuple(indices) if indices is not None else None for indices in (window, frames))


def _patched(options: Mapping[str, Any]) -> Hashable:
    """A key for other nodes' patches: perturbed attention guidance calls the model again with a block replaced."""
    patches = options.get(PATCHES) or {}
    replaced = options.get(REPLACEMENTS) or {}
    return (
        tuple(sorted((str(kind), len(found)) for kind, found in patches.items())),
        tuple(sorted((str(kind), tuple(sorted(map(str, where)))) for kind, where in replaced.items())),
    )
