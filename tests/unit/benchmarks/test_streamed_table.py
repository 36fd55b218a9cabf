"""The rows of `benchmarks.streamed`: the bound of a step, and which aims it misses."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.streamed_table import ALL, OURS, STOCK, bound, compiled_line, line, rows_of

BUS = 50.0


def row(ours: float, moved: float, stock: float = 0.3) -> dict[str, Any]:
    """Of a model whose steps take 0.15 s with all memory, and for which stock moves 12 GB."""
    resident = {"s_per_step": 0.15, "bytes_per_step": 0}
    measured = {
        STOCK: {ALL: resident, "12": {"s_per_step": stock, "bytes_per_step": 12e9}},
        OURS: {ALL: resident, "12": {"s_per_step": ours, "bytes_per_step": moved, "error": 1e-3}},
    }
    return rows_of({"flux": measured}, {"flux": 24.0}, BUS)[1]


@pytest.mark.parametrize(("moved", "least"), [(5e9, 0.15), (10e9, 0.2)])
def test_a_step_is_bound_by_computing_or_by_the_bus(moved: float, least: float) -> None:
    assert bound(row(0.2, moved)) == pytest.approx(least)


@pytest.mark.parametrize(
    ("ours", "missed"),
    [(0.16, ""), (0.2, "missed: 1.15 times the bound"), (0.25, "missed: 1.25 times stock"), (0.4, "slower than stock")],
)
def test_a_line_says_what_is_missed(ours: float, missed: str) -> None:
    assert missed in line(row(ours, 5e9))
    assert ("missed" in line(row(ours, 5e9))) is bool(missed)


def test_what_failed_has_no_figures() -> None:
    found = rows_of({"flux": {STOCK: {"8": {"failed": "out of memory"}}}}, {"flux": 24.0}, BUS)[0]
    assert bound(found) is None
    assert "stock failed: out of memory" in line(found)


def test_a_line_tells_the_speed_of_the_bus_and_what_ran_beside_the_steps() -> None:
    found = row(0.2, 8e9)
    found["details"][OURS] |= {"prologues": 1140, "regions_compiled": 0}
    assert "resolute reached 40.0 GB/s; 1140 prologues, 0 regions compiled" in line(found)
    assert "stock reached 40.0 GB/s" in line(found)


def test_what_compiling_took_is_one_line() -> None:
    found = {"regions": 2, "waited_s": 9.5, "prompt_s": 14.0}
    assert compiled_line("flux", "12", found).endswith("2 regions compiled, waited 9.5 of 14.0 s")
    assert compiled_line("flux", "12", {"failed": "no memory"}).endswith("compiling failed: no memory")
