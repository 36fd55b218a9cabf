"""Each cell of `benchmarks.video` runs through on the CPU with tiny widths, so that a run on a GPU loses no minute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import video

from .families.kit import forget_regions, run_traces

pytestmark = pytest.mark.usefixtures("inference")


@pytest.mark.long
@pytest.mark.parametrize("cell", video.CELLS, ids=lambda cell: f"{cell.name}-{cell.what}")
def test_a_cell_compiles_and_is_compared(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, cell: Any) -> None:
    run_traces(core, monkeypatch)
    monkeypatch.setattr(video, "_ours", core.ours)
    forget_regions(core)
    ticks = iter(range(10**6))
    # The first run compiles, which takes most of its seconds: as on a GPU it does not count.
    watch = SimpleNamespace(stop=lambda: None, seconds=lambda wait: 1e4 + tick if (tick := next(ticks)) else 1e-9)
    monkeypatch.setattr(core.ours("process.runtime").cache().whole_calls, "_stopwatch", lambda device: watch)
    part, row = map(dict, video.measure(cell, None, is_small=True))
    assert part["lacks"] == ["stock"] and "resolute_s" in part
    assert row["lacks"] == [] and "faster" in row
    assert row["error"] < 1e-4
    assert row["compiles"] > 0
    assert row["region_calls"] > 0
    assert row["later_compiles"] == 0
    if cell.name == "sdxl":  # a decoder of pictures always runs compiled
        assert not {"left_alone", "calls_to_compare"} & row.keys()
        assert row["bypasses"] == {}
    else:
        assert row["calls_to_compare"] <= 5
        assert not row["left_alone"]
    assert set(row["bypasses"]) <= {"not_faster"}
    assert cell.name in video.table([row])


def test_a_cell_that_fails_names_the_line_and_so_the_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(name: str, is_small: bool) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(video, "loaded_vae", full)
    (row,) = video.attempt(video.CELLS[0], None, is_small=True)
    assert row["failed"].startswith("vae, given = loaded_vae(cell.name, is_small)")
    assert row["failed"].endswith("RuntimeError: no memory")
