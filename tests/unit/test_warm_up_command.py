"""What `scripts/warm-up` makes of the texts that a warm-up's prompt shows."""

from __future__ import annotations

import pytest

from compile_cache.warm_up_plan import FAILED, READY, WARMED, Outcome, table
from scripts.support.warm_up import WarmUp


def report(*states: str, left_out: tuple[str, ...] = ()) -> str:
    """As the Warm Up node writes it."""
    return "\n".join([table(Outcome("64x64", "model", state, 0.5, 0, "5 failed once") for state in states), *left_out])


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        (report(READY, WARMED), 0),
        (report(FAILED), 1),
        (report(READY, WARMED, FAILED, FAILED), 2),
        (report(READY, left_out=("The VAE is not compiled: put Compile VAE Decode before Warm Up.",)), 1),
        (report(FAILED, left_out=("The model is not compiled.", "The VAE is not compiled.")), 3),
    ],
)
def test_what_could_not_be_warmed_up_is_counted(text: str, failed: int) -> None:
    done = WarmUp([text])
    assert done.reports == [text]
    assert done.failed == failed


def test_texts_of_other_nodes_are_no_reports() -> None:
    own = report(WARMED)
    done = WarmUp(["", "a town where 3 failed heroes live", own, "3 failed; never"])
    assert done.reports == [own]
    assert done.failed == 0
