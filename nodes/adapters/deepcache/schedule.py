"""Plan which steps of a sampling run execute the whole network. Plain numbers: no torch, no ComfyUI."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ....compile_cache.errors import UserError, excerpt
from ....compile_cache.texts import Text

UNIFORM, NON_UNIFORM = "uniform", "non-uniform"
SCHEDULES = (UNIFORM, NON_UNIFORM)
# With so few steps, each one changes the picture so much that no feature is still valid one step later.
FEW_STEPS = 8
# Samplers compute their sigmas in float32, some of them through logarithms.
_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Settings:
    """The inputs of the DeepCache node.

    interval: steps from one full step to the next. depth: see `passes`; `node` checks it against the model.
    start_percent, end_percent: of the noise levels, as everywhere in ComfyUI, from 0.0 (pure noise) to 1.0. power,
    centre (a step): the shape of the non-uniform schedule. Raises UserError for an invalid value.
    """

    interval: int = 3
    depth: int = 2
    start_percent: float = 0.0
    end_percent: float = 1.0
    schedule: str = UNIFORM
    power: float = 1.4
    centre: int = 15

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise UserError(f"interval {self.interval} is too small: 1 runs every step in full, 3 every third.")
        if self.schedule not in SCHEDULES:
            raise UserError(f"There is no schedule '{excerpt(self.schedule)}'. Choose one of: {', '.join(SCHEDULES)}.")
        if not 1 <= self.power < math.inf:
            raise UserError(
                f"power {self.power} is no number from 1 on: 1 is uniform, more moves full steps to the centre."
            )
        if self.start_percent >= self.end_percent:
            raise UserError(
                f"start_percent {self.start_percent:g} is not before end_percent {self.end_percent:g}, so DeepCache "
                "would do nothing. Choose a smaller start_percent, or take the node out."
            )


@dataclass(frozen=True, slots=True)
class Plan:
    """sources: for each step, the step whose feature it starts from, or None if the whole network runs.

    keeps: the full steps whose feature a later step uses. reason: why no step is fast, if none is.
    """

    sources: tuple[int | None, ...]
    reason: str = ""

    @property
    def steps(self) -> int:
        return len(self.sources)

    @property
    def fast(self) -> int:
        return sum(source is not None for source in self.sources)

    @property
    def keeps(self) -> frozenset[int]:
        return frozenset(source for source in self.sources if source is not None)

    def summary(self, fast_share: float) -> Text:
        """One line for people. fast_share: the cost of a fast pass as a share of a full one's, 0 to 1."""
        if not self.fast:
            return Text("{count} steps, all full: {why}", count=self.steps, why=self.reason)
        full = self.steps - self.fast
        speedup = f"{self.steps / (full + self.fast * fast_share):.1f}"
        text = "{count} steps: {full} full, {fast} fast, about {speedup}x"
        return Text(text, count=self.steps, full=full, fast=self.fast, speedup=speedup)


def plan(settings: Settings, steps: int, window: tuple[int, int] | None = None) -> Plan:
    """Plan a run of `steps` steps. window: the first step that may be fast or kept, and the step after the last one."""
    first, stop = window or (0, steps)
    reason = ""
    if settings.interval == 1:
        reason = Text("interval is 1")
    elif steps <= FEW_STEPS:
        reason = Text("{count} steps or fewer leave nothing to skip", count=FEW_STEPS)
    elif stop - first < 2:
        reason = Text("start and end percent leave no step to skip")
    full = set(_full_steps(settings, first, stop)) if not reason else set()
    sources: list[int | None] = []
    kept: int | None = None
    for step in range(steps):
        inside = not reason and first <= step < stop
        if step in full or not inside:
            kept = step if inside else None
            sources.append(None)
        else:
            sources.append(kept)
    if not reason and not any(source is not None for source in sources):
        reason = Text("the schedule leaves no step to skip")
    return Plan(tuple(sources), reason)


def _full_steps(settings: Settings, first: int, stop: int) -> list[int]:
    count = math.ceil((stop - first) / settings.interval)
    if settings.schedule == UNIFORM:
        return [first + number * settings.interval for number in range(count)]
    return [first + step for step in _denser_at_centre(stop - first, count, settings.centre - first, settings.power)]


def _denser_at_centre(steps: int, count: int, centre: int, power: float) -> list[int]:
    """`count` of `steps` steps, always with the first, denser at `centre` (the paper's non-uniform 1:N schedule).

    Points evenly spaced in the `power`-th root of the distance to the centre are raised to `power`. If two of them
    round to one step, the power is lowered until none do; with power 1 they are evenly spaced.
    """
    centre = min(max(centre, 0), steps)
    while True:
        left, right = -(centre ** (1 / power)), (steps - centre) ** (1 / power)
        points = [left + (right - left) * number / count for number in range(count)]
        # Rounded first: raising a root to its power gives 3.9999999 for 4.
        chosen = [math.floor(round(math.copysign(abs(at) ** power, at) + centre, 6)) for at in points]
        if power == 1 or all(later > earlier for earlier, later in pairwise(chosen)):
            return chosen
        power = max(1.0, power - 0.02)


def step_of(sigma: float, sigmas: Sequence[float]) -> int:
    """The step of a sampler's schedule that a call at noise level `sigma` belongs to: it starts at `sigma` or contains
    it. A call before the first step (with noise added) belongs to the first, one at the end to the last.

    sigmas: one more than there are steps; falling, or rising when a picture is turned back into noise.
    """
    rising = sigmas[-1] > sigmas[0]
    margin = 1 - _TOLERANCE if rising else 1 + _TOLERANCE
    reached = sum(level * margin <= sigma if rising else level * margin >= sigma for level in sigmas)
    return min(max(reached - 1, 0), len(sigmas) - 2)


def window_of(sigmas: Sequence[float], start_sigma: float, end_sigma: float) -> tuple[int, int]:
    """The steps that start at a noise level in (end_sigma, start_sigma]: the first one, and the one after the last.

    start_sigma, end_sigma: from ComfyUI's `percent_to_sigma`, so the start's is the higher one.
    """
    inside = [step for step, level in enumerate(sigmas[:-1]) if end_sigma < level <= start_sigma]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)
