"""DeepCache's schedule: which steps run in full, and the sentence that the node shows."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def schedule(pack: Any) -> Any:
    return pack("nodes.adapters.deepcache.schedule")


def full(plan: Any) -> list[int]:
    return [step for step, source in enumerate(plan.sources) if source is None]


class TestUniform:
    @pytest.mark.parametrize(
        ("interval", "steps", "expected"),
        [
            (3, 20, [0, 3, 6, 9, 12, 15, 18]),
            (2, 9, [0, 2, 4, 6, 8]),
            (5, 20, [0, 5, 10, 15]),
            (10, 20, [0, 10]),
            (10, 9, [0]),
        ],
    )
    def test_every_interval_th_step_is_full(self, schedule: Any, interval: int, steps: int, expected: Any) -> None:
        assert full(schedule.plan(schedule.Settings(interval=interval), steps)) == expected

    def test_a_fast_step_starts_from_the_latest_full_one(self, schedule: Any) -> None:
        plan = schedule.plan(schedule.Settings(interval=4), 10)
        assert plan.sources == (None, 0, 0, 0, None, 4, 4, 4, None, 8)
        assert plan.keeps == {0, 4, 8}

    def test_a_full_step_without_fast_steps_after_it_is_not_kept(self, schedule: Any) -> None:
        assert schedule.plan(schedule.Settings(interval=3), 10).keeps == {0, 3, 6}

    def test_outside_the_window_every_step_is_full(self, schedule: Any) -> None:
        plan = schedule.plan(schedule.Settings(interval=3), 12, (3, 8))
        assert plan.sources == (None, None, None, None, 3, 3, None, 6, None, None, None, None)
        assert plan.keeps == {3, 6}


class TestNonUniform:
    @pytest.mark.parametrize("interval", [2, 3, 5, 10])
    @pytest.mark.parametrize("steps", [9, 20, 50])
    @pytest.mark.parametrize("power", [1.0, 1.4, 3.0, 10.0])
    @pytest.mark.parametrize("centre", [0, 4, 15, 1000])
    def test_it_has_as_many_full_steps_as_uniform(
        self, schedule: Any, interval: int, steps: int, power: float, centre: int
    ) -> None:
        settings = schedule.Settings(interval=interval, schedule=schedule.NON_UNIFORM, power=power, centre=centre)
        chosen = full(schedule.plan(settings, steps))
        assert chosen[0] == 0
        assert len(chosen) == len(full(schedule.plan(schedule.Settings(interval=interval), steps)))

    def test_they_are_denser_at_the_centre(self, schedule: Any) -> None:
        # The paper's setting for 50 steps and interval 5.
        chosen = full(schedule.plan(schedule.Settings(5, 2, schedule=schedule.NON_UNIFORM), 50))
        gaps = [after - before for before, after in zip(chosen, [*chosen[1:], 50], strict=True)]
        nearest = min(range(len(chosen)), key=lambda index: abs(chosen[index] - 15))
        assert min(gaps) == min(gaps[nearest - 1 : nearest + 1]) < 5 < gaps[-1]

    def test_with_power_1_it_is_evenly_spaced(self, schedule: Any) -> None:
        even = schedule.Settings(5, 2, schedule=schedule.NON_UNIFORM, power=1.0)
        assert full(schedule.plan(even, 50)) == list(range(0, 50, 5))

    def test_the_centre_is_a_step_of_the_run_also_inside_a_window(self, schedule: Any) -> None:
        settings = schedule.Settings(5, 2, schedule=schedule.NON_UNIFORM, power=2.0, centre=30)
        chosen = [step for step in full(schedule.plan(settings, 50, (20, 50))) if step >= 20]
        assert chosen[0] == 20
        assert min(abs(step - 30) for step in chosen) <= 1


class TestWhereNothingIsSkipped:
    @pytest.mark.parametrize(
        ("changes", "steps", "window", "reason"),
        [
            ({"interval": 1}, 20, None, "interval is 1"),
            ({}, 8, None, "8 steps or fewer leave nothing to skip"),
            ({}, 1, None, "8 steps or fewer leave nothing to skip"),
            ({}, 20, (0, 0), "start and end percent leave no step to skip"),
            ({}, 20, (19, 20), "start and end percent leave no step to skip"),
        ],
    )
    def test_every_step_is_full_with_a_reason(
        self, schedule: Any, changes: Any, steps: int, window: Any, reason: str
    ) -> None:
        plan = schedule.plan(schedule.Settings(**changes), steps, window)
        assert plan.fast == 0
        assert not plan.keeps
        assert plan.summary(0.3) == f"{steps} step{'s' if steps > 1 else ''}, all full: {reason}"

    def test_nine_steps_are_enough(self, schedule: Any) -> None:
        assert schedule.plan(schedule.Settings(), 9).fast == 6


def test_the_shown_line_has_counts_and_an_estimate(schedule: Any) -> None:
    plan = schedule.plan(schedule.Settings(), 20)
    assert plan.summary(0.23) == "20 steps: 7 full, 13 fast, about 2.0x"
    assert plan.summary(1.0) == "20 steps: 7 full, 13 fast, about 1.0x"


class TestStepOfANoiseLevel:
    SIGMAS = (14.6, 8.0, 4.0, 2.0, 0.0)

    @pytest.mark.parametrize(
        ("sigma", "step"),
        [
            (14.6, 0),
            (20.0, 0),
            (10.0, 0),
            (8.0, 1),
            (8.0000002, 1),
            (7.9999998, 1),
            (5.0, 1),
            (2.0, 3),
            (0.01, 3),
            (0.0, 3),
        ],
    )
    def test_a_call_belongs_to_the_step_of_its_noise_level(self, schedule: Any, sigma: float, step: int) -> None:
        assert schedule.step_of(sigma, self.SIGMAS) == step

    @pytest.mark.parametrize(("sigma", "step"), [(0.0, 0), (1.0, 0), (2.0, 1), (5.0, 2), (14.6, 3), (99.0, 3)])
    def test_rising_noise_levels_are_supported(self, schedule: Any, sigma: float, step: int) -> None:
        assert schedule.step_of(sigma, self.SIGMAS[::-1]) == step

    def test_each_level_of_a_long_schedule_is_its_own_step(self, schedule: Any) -> None:
        sigmas = [14.6 * 0.99**step for step in range(1000)] + [0.0]
        assert [schedule.step_of(sigma, sigmas) for sigma in sigmas[:-1]] == list(range(1000))

    @pytest.mark.parametrize(
        ("start", "end", "window"),
        [(1e9, 0.0, (0, 4)), (8.0, 0.0, (1, 4)), (1e9, 4.0, (0, 2)), (7.9, 2.0, (2, 3)), (1.0, 0.5, (0, 0))],
    )
    def test_a_window_contains_the_steps_that_start_inside(
        self, schedule: Any, start: float, end: float, window: Any
    ) -> None:
        assert schedule.window_of(self.SIGMAS, start, end) == window


class TestSettings:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"interval": 0}, "interval 0 is too small"),
            ({"schedule": "random"}, "Choose one of: uniform, non-uniform"),
            ({"power": 0.5}, "power 0.5 is no number from 1 on"),
            ({"power": float("nan")}, "power nan is no number from 1 on"),
            ({"start_percent": 0.6, "end_percent": 0.5}, "start_percent 0.6 is not before end_percent 0.5"),
        ],
    )
    def test_an_invalid_value_is_refused_with_a_sentence(
        self, schedule: Any, user_error: type[Exception], changes: Any, words: str
    ) -> None:
        with pytest.raises(user_error, match=words):
            schedule.Settings(**changes)
