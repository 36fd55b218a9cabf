"""Results of measurements on disk: valid for one machine, bounded, and never in the way.

Files that are not right: ../store/test_faults.py.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_cache.attention.shape import Choice, Shape
from compile_cache.tuning import tuner as tuners
from compile_cache.tuning.machine import machine_of
from compile_cache.tuning.tuner import Trial, Tuner

MACHINE = ("NVIDIA H200", "(9, 0)", "150000000000", "13000", "2.11.0", "13.0", "91900")
CHOICE = Choice({"flash": 0.335, "cudnn": 0.185}, {"flash": 1, "cudnn": 1}, {"efficient": "no such kernel"}, "cudnn")
GPU = "cuda:0"


def shape(queries: int = 4096, keys: int | None = None, **kwargs: Any) -> Shape:
    made = {"dtype": "torch.float16", "v_width": 64, "switches": (True, True, True, True, False), **kwargs}
    return Shape(q=(2, 10, queries, 64), k=(2, 10, queries if keys is None else keys, 64), **made)


def tuner(folder: Path | None, machine: tuple[str, ...] = MACHINE) -> Tuner[Shape, Choice]:
    return Tuner("choices", Shape, Choice, folder, lambda device: machine)


def stored(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_the_next_process_finds_what_was_set(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "attention"
    one = tuner(folder)
    like = Choice(chosen="cudnn", like=(4096, 77))
    masked = shape(mask=(2, 1, 1, 4096), mask_dtype="torch.bool")
    entries = [(shape(), CHOICE), (shape(2025, 77), like), (masked, CHOICE)]
    for each, choice in entries:
        one.set(GPU, each, choice)
    assert tuner(folder).on(GPU) == one.on(GPU) == entries
    assert list(one) == [(GPU, *entry) for entry in entries]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("place", range(len(MACHINE)))
def test_another_machine_driver_or_version_measures_itself(tmp_path: Path, place: int) -> None:
    tuner(tmp_path).set(GPU, shape(), CHOICE)
    other = (*MACHINE[:place], "another", *MACHINE[place + 1 :])
    elsewhere = tuner(tmp_path, other)
    assert elsewhere.on(GPU) == []
    stored(tmp_path).rename(elsewhere._path(GPU) or tmp_path)  # a file that came from elsewhere
    assert tuner(tmp_path, other).on(GPU) == []


def test_without_a_folder_results_stay_in_memory() -> None:
    one = tuner(None)
    one.set(GPU, shape(), CHOICE)
    assert one.get(GPU, shape()) == CHOICE


def test_the_oldest_entry_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuners, "_MOST", 3)
    one = tuner(tmp_path)
    for queries in (1, 2, 3, 1, 4):
        one.set(GPU, shape(queries), CHOICE)
    assert [each.q[2] for each, _ in tuner(tmp_path).on(GPU)] == [3, 1, 4]


def test_what_is_forgotten_is_forgotten_by_the_next_process_too(tmp_path: Path) -> None:
    one = tuner(tmp_path)
    for queries in (1, 2, 3):
        one.set(GPU, shape(queries), CHOICE)
    one.remove(GPU, shape(2))
    assert [each.q[2] for each, _ in tuner(tmp_path).on(GPU)] == [1, 3]
    one.clear()
    assert tuner(tmp_path).on(GPU) == []


def test_a_disk_that_refuses_costs_only_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    one = tuner(tmp_path / "file" / "attention")
    one.set(GPU, shape(), CHOICE)
    assert one.get(GPU, shape()) == CHOICE
    assert "were not stored" in caplog.text


def test_the_fastest_candidate_is_chosen_unless_the_first_is_nearly_as_fast() -> None:
    trial = Trial()
    assert trial.fastest() == ""
    for name, seconds in (("flash", 1.0), ("math", 2.0), ("math", 0.95), ("math", 3.0)):
        trial = trial.with_run(name, seconds)
    assert (trial.seconds, trial.runs) == ({"flash": 1.0, "math": 0.95}, {"flash": 1, "math": 3})
    assert (trial.fastest(), trial.fastest(margin=0.9)) == ("math", "flash")


def test_a_machine_is_its_gpu_its_memory_and_its_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_of("cpu") == ("cpu", str(torch.__version__))

    def machines() -> Iterator[tuple[str, ...]]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        for name, memory in (("H100", 80), ("H100", 40), ("T4", 16)):
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
            properties = type("Properties", (), {"total_memory": memory})
            monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
            yield machine_of("cuda:0")

    assert len(set(machines())) == 3
