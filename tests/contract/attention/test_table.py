"""The table of attention's choices on disk: valid for one machine, bounded, and never in the way."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_cache.attention.table import Choice, ChoiceTable, Shape, machine_of
from compile_cache.choices import machine_table

MACHINE = ("NVIDIA H200", "(9, 0)", "13000", "2.11.0", "13.0", "91900", "")
CHOICE = Choice("cudnn", {"flash": 0.335, "cudnn": 0.185}, {"efficient": "no such kernel"})


def shape(queries: int = 4096, keys: int | None = None, **kwargs: Any) -> Shape:
    made = {"dtype": "torch.float16", "v_width": 64, "switches": (True, True, True, True, False), **kwargs}
    return Shape(q=(2, 10, queries, 64), k=(2, 10, queries if keys is None else keys, 64), **made)


def stored(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_the_next_process_finds_what_was_set(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "attention"
    table = ChoiceTable(folder, MACHINE)
    like = Choice("cudnn", like=(4096, 77))
    masked = shape(mask=(2, 1, 1, 4096), mask_dtype="torch.bool")
    found = [(shape(), CHOICE), (shape(2025, 77), like), (masked, CHOICE)]
    for each, choice in found:
        table.set(each, choice)
    assert list(ChoiceTable(folder, MACHINE)) == list(table) == found
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("place", range(len(MACHINE)))
def test_another_machine_driver_or_version_measures_itself(tmp_path: Path, place: int) -> None:
    ChoiceTable(tmp_path, MACHINE).set(shape(), CHOICE)
    other = (*MACHINE[:place], "another", *MACHINE[place + 1 :])
    assert list(ChoiceTable(tmp_path, other)) == []
    stored(tmp_path).rename(ChoiceTable(tmp_path, other)._path or tmp_path)  # a file that came from elsewhere
    assert list(ChoiceTable(tmp_path, other)) == []


def test_without_a_folder_choices_stay_in_memory() -> None:
    table = ChoiceTable(None, MACHINE)
    table.set(shape(), CHOICE)
    assert table.get(shape()) == CHOICE


def test_the_oldest_shape_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_table, "_MOST", 3)
    table = ChoiceTable(tmp_path, MACHINE)
    for queries in (1, 2, 3, 1, 4):
        table.set(shape(queries), CHOICE)
    kept = [each.q[2] for each, _ in ChoiceTable(tmp_path, MACHINE)]
    assert kept == [3, 1, 4]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(format=99),
        lambda data: data.pop("entries"),
        lambda data: data["entries"][0].update(q=[1, 2, -3, 4]),
        lambda data: data["entries"][0].update(k=[1, 2]),
        lambda data: data["entries"][0].update(mask=[1, 2]),
        lambda data: data["entries"][0].update(mask_dtype=1),
        lambda data: data["entries"][0].update(kernel=["cudnn"]),
        lambda data: data["entries"][0].update(milliseconds=[1]),
        lambda data: data["entries"][0].update(like=[1, 2, 3]),
    ],
)
def test_a_damaged_table_is_empty_and_is_replaced(tmp_path: Path, change: Any) -> None:
    ChoiceTable(tmp_path, MACHINE).set(shape(), CHOICE)
    data = json.loads(stored(tmp_path).read_text())
    change(data)
    stored(tmp_path).write_text(json.dumps(data))
    table = ChoiceTable(tmp_path, MACHINE)
    assert list(table) == []
    table.set(shape(1), CHOICE)
    assert list(ChoiceTable(tmp_path, MACHINE)) == [(shape(1), CHOICE)]


def test_a_disk_that_refuses_costs_only_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    table = ChoiceTable(tmp_path / "file" / "attention", MACHINE)
    table.set(shape(), CHOICE)
    assert table.get(shape()) == CHOICE
    assert "were not stored" in caplog.text


def test_the_nearest_measured_shape_of_the_same_kind_is_a_neighbour() -> None:
    table = ChoiceTable(None, MACHINE)
    other = Choice("flash", {"flash": 0.02})
    table.set(shape(1024), CHOICE)
    table.set(shape(3000), other)
    table.set(shape(1500), Choice("flash", like=(1024, 1024)))  # not measured, so no neighbour
    assert table.near(shape(2000)) == (shape(3000), other)
    assert table.near(shape(1500)) == (shape(1024), CHOICE)
    assert table.near(shape(512)) == (shape(1024), CHOICE)
    for far in (shape(511), shape(6001), shape(1024, 77), shape(1024, dtype="torch.bfloat16"), shape(1024, v_width=32)):
        assert table.near(far) is None, far
    assert table.near(shape(1024, switches=(True, True, False, True, False))) is None


def test_a_neighbour_has_at_most_twice_or_half_the_batch() -> None:
    table = ChoiceTable(None, MACHINE)
    table.set(shape(1024), CHOICE)
    of_batch = lambda batch: replace(shape(1024), q=(batch, 10, 1024, 64), k=(batch, 10, 1024, 64))  # noqa: E731
    assert [table.near(of_batch(batch)) is not None for batch in (1, 4, 5)] == [True, True, False]


def test_a_mask_of_another_kind_is_no_neighbour() -> None:
    table = ChoiceTable(None, MACHINE)
    of_keys = {"mask": (2, 1, 1, 1024), "mask_dtype": "torch.bool"}
    table.set(shape(1024, **of_keys), CHOICE)
    assert table.near(shape(1500, **{**of_keys, "mask": (2, 1, 1, 1500)})) is not None
    for other in ({"mask": (2, 1, 1500, 1500)}, {"mask": (1, 1, 1, 1500)}, {"mask_dtype": "torch.float16"}):
        assert table.near(shape(1500, **{**of_keys, **other})) is None, other
    assert table.near(shape(1500)) is None


def test_the_machine_of_a_cpu_has_no_gpu() -> None:
    assert machine_of(torch.device("cpu")) == ("cpu", str(torch.__version__))
