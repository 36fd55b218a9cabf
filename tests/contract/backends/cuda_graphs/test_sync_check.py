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


class Overlapping:
    """`warnings.catch_warnings` in another thread, which begins and ends when the test says so."""

    def __init__(self) -> None:
        self._leave, self._entered = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._entered.set()
            self._leave.wait(30)

    def enter(self) -> None:
        self._thread.start()
        assert self._entered.wait(30)

    def leave(self) -> None:
        self._leave.set()
        self._thread.join()


def test_nothing_stays_installed_where_another_thread_ends_later() -> None:
    other, found = Overlapping(), list[str]()
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: found.append(str(message))
        with recorded_waits():
            other.enter()
        other.leave()  # and puts back what it found: our handler, and the list with our filter
        assert not [each for each in warnings.filters if each[0] == "always" and "synchronizing" in str(each[1])]
        warnings.simplefilter("always")
        wait()
        warnings.warn("something else", UserWarning, stacklevel=1)
    assert found == [WAIT, "something else"]


@pytest.mark.parametrize("begins", ["before", "meanwhile"])
def test_a_rehearsal_that_another_thread_disturbed_counts_as_waiting(begins: str) -> None:
    other = Overlapping()
    if begins == "before":
        other.enter()
    with recorded_waits() as waits:
        if begins == "meanwhile":
            other.enter()
        else:
            other.leave()
        wait()
    if begins == "meanwhile":
        other.leave()
    assert len(waits) == 1
    assert "another thread" in waits[0]


def test_code_that_catches_warnings_itself_disturbs_nothing() -> None:
    with recorded_waits() as waits:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
        wait()
    assert len(waits) == 1
    assert __file__ in waits[0]


def test_the_mode_is_set_back_after_an_error(modes: list[object]) -> None:
    with pytest.raises(ValueError, match="of the model"), recorded_waits():
        raise ValueError("of the model")
    assert modes == ["warn", 0]
