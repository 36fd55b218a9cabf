"""A rehearsal finds what waits for the GPU in its own thread, and troubles no other one."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch

from compile_cache.backends.cuda_graphs.sync_check import recorded_waits

WAIT = "called a synchronizing CUDA operation (Triggered internally at Functions.cpp:42.)"


@pytest.fixture(autouse=True)
def modes(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The modes that were set; torch on the CPU has none."""
    seen: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", seen.append)
    return seen


def wait() -> None:
    warnings.warn(WAIT, UserWarning, stacklevel=1)


def test_each_wait_is_recorded_with_its_place(modes: list[object]) -> None:
    with recorded_waits() as waits:
        wait()
        wait()
    assert len(waits) == 2
    assert __file__ in waits[0]
    assert modes == ["warn", 0]


def test_code_that_waits_for_nothing_records_nothing() -> None:
    with recorded_waits() as waits:
        torch.ones(2) + 1
    assert waits == []


def test_a_wait_of_another_thread_neither_raises_nor_counts() -> None:
    errors: list[BaseException] = []

    def other() -> None:
        try:
            wait()
        except BaseException as error:  # noqa: BLE001 (the test asks for any)
            errors.append(error)

    with recorded_waits() as waits:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert (waits, errors) == ([], [])


def test_other_warnings_go_their_usual_way() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with recorded_waits() as waits:
            warnings.warn("something else", UserWarning, stacklevel=1)
    assert waits == []
    assert [str(each.message) for each in seen] == ["something else"]


def test_the_mode_is_set_back_after_an_error(modes: list[object]) -> None:
    with pytest.raises(ValueError, match="of the model"), recorded_waits():
        raise ValueError("of the model")
    assert modes == ["warn", 0]
