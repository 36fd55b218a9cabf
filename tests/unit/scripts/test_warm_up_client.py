"""`scripts/warm-up` reads the texts that the nodes of a warm-up show."""

from __future__ import annotations

import pytest

from compile_cache.warm_up_plan import FAILED, READY, WARMED, Outcome, table
from scripts.commands.warm_up import FinishedWarmUp


def report(*states: str, skipped: tuple[str, ...] = ()) -> str:
    """The text of a Warm Up node."""
    return "\n".join([table(Outcome("64x64", "model", state, 0.5, 0, "5 failed once") for state in states), *skipped])


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        (report(READY, WARMED), 0),
        (report(FAILED), 1),
        (report(READY, WARMED, FAILED, FAILED), 2),
        (report(READY, skipped=("The VAE is not compiled: put Compile VAE Decode before Warm Up.",)), 1),
        (report(FAILED, skipped=("The model is not compiled.", "The VAE is not compiled.")), 3),
    ],
)
def test_failed_shapes_and_skipped_inputs_are_counted(text: str, failed: int) -> None:
    done = FinishedWarmUp([text])
    assert done.reports == [text]
    assert done.failed == failed


def test_texts_of_other_nodes_are_not_reports() -> None:
    own = report(WARMED)
    done = FinishedWarmUp(["", "a town where 3 failed heroes live", own, "3 failed; never"])
    assert done.reports == [own]
    assert done.failed == 0
