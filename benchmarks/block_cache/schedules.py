"""Which steps of a run are computed in full: fixed, or planned on one full run that was watched."""

from __future__ import annotations

from itertools import pairwise

import torch

from .passes import Passes, sample, sigmas


def fixed(steps: int, interval: int) -> list[int]:
    """Every so many steps one full pass, as DeepCache's uniform schedule."""
    return list(range(0, steps, interval))


def watched(passes: Passes, x: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """What the middle blocks added in each step of a full run: `steps` tensors of every fourth token."""
    seen = []

    def predict(step: int, both: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        velocity = passes.run(both, t, is_full=True)
        seen.append(passes.residual[:, ::4].float().clone())
        return velocity

    sample(predict, x, steps)
    return seen


def by_threshold(seen: list[torch.Tensor], threshold: float) -> list[int]:
    """A full pass wherever the relative changes since the last one add up to the threshold."""
    full, gone = [0], 0.0
    for step, (before, after) in enumerate(pairwise(seen), start=1):
        gone += float((after - before).norm() / after.norm())
        if gone >= threshold:
            full.append(step)
            gone = 0.0
    return full


def by_distance(seen: list[torch.Tensor], budget: int, weights: list[float] | None = None) -> list[int]:
    """The `budget` full steps that make the reused residuals' distance to the true ones smallest, each weighed.

    weights: of each step; by default the length of the step in noise levels.
    """
    steps = len(seen)
    if weights is None:
        levels = sigmas(steps, "cpu")
        weights = [float(levels[at] - levels[at + 1]) for at in range(steps)]
    cost = [[0.0] * (steps + 1) for _ in range(steps)]  # [start][end]: of reusing start's up to before end
    for start in range(steps):
        for end in range(start + 1, steps + 1):
            cost[start][end] = cost[start][end - 1] if end > start + 1 else 0.0
            if end - 1 > start:
                cost[start][end] += weights[end - 1] * float((seen[end - 1] - seen[start]).norm())
    # best[k][s]: the smallest cost of all before s, with k full passes before it, when s is computed in full
    best = [{0: (0.0, -1)}]
    for _ in range(1, budget):
        previous = best[-1]
        best.append(
            {
                s: min((previous[p][0] + cost[p][s], p) for p in previous if p < s)
                for s in range(1, steps)
                if any(p < s for p in previous)
            }
        )
    at = min(best[-1], key=lambda s: best[-1][s][0] + cost[s][steps])
    full = []
    for layer in reversed(best):
        full.append(at)
        at = layer[at][1]
    return sorted(full)


def probed_weights(passes: Passes, x: torch.Tensor, steps: int, seen: list[torch.Tensor]) -> list[float]:
    """How much the picture suffers for each unit of a residual's distance: one run for each step, which skips it.

    Costs as many runs as there are steps, so it is no plan for a user: it shows how far planning could go.
    """
    reference = sample(lambda _, both, t: passes.run(both, t, is_full=True), x, steps)
    weights = [0.0]
    for skipped in range(1, steps):
        picture = sample(lambda step, both, t, s=skipped: passes.run(both, t, step != s), x, steps)
        distance = float((seen[skipped] - seen[skipped - 1]).norm())
        weights.append(float((picture - reference).norm()) / max(distance, 1e-9))
    return weights
