"""A ballast leaves the memory that was asked for, also while a server that ended still gives memory back.

Its process runs eagerly, with a torch whose device is a file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import ballast
from scripts.errors import ServerError

TORCH = """
import json, pathlib, sys, time

PLACE = pathlib.Path({place!r})
GIB = 2**30
STATE = {state!r}
held, began = 0, time.monotonic()
uint8 = "uint8"

class cuda:
    @staticmethod
    def mem_get_info():
        others = STATE["others"] if time.monotonic() - began < STATE["ends_after"] else 0.0
        free = int((STATE["total"] - others) * GIB) - held
        PLACE.write_text(str(free))
        return free, int(STATE["total"] * GIB)

def empty(size, dtype, device):
    global held
    if size > STATE["largest_piece"] or size > cuda.mem_get_info()[0]:
        raise RuntimeError("CUDA out of memory")
    held += size
    return object()

def zeros(count, device):
    global held
    held += 2**21
    return object()
"""

Card = Callable[..., Path]


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Card:
    """total: GiB. others: GiB of a process that ends after so many seconds. largest_piece: bytes. Returns a file with
    the bytes that are free.
    """

    def make(total: float, others: float = 0.0, ends_after: float = 0.0, largest_piece: float = 2.0**40) -> Path:
        state = {"total": total, "others": others, "ends_after": ends_after, "largest_piece": largest_piece}
        place = tmp_path / "free"
        (tmp_path / "torch.py").write_text(TORCH.format(place=str(place), state=state), "utf-8")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return place

    return make


def left(free: Path) -> float:
    return int(free.read_text()) / 2**30


def test_it_leaves_what_was_asked_for(card: Card) -> None:
    free = card(79.2)
    with ballast.held(8, sys.executable, settles=1):
        assert left(free) == pytest.approx(8, abs=2**-4)


def test_memory_that_a_server_gives_back_late_is_held_too(card: Card) -> None:
    """It ended a moment ago: less than the card is free, and then more than the ballast has left."""
    for others in (75.0, 30.0):
        free = card(79.2, others=others, ends_after=0.6)
        with ballast.held(8, sys.executable, settles=8):
            assert left(free) == pytest.approx(8, abs=2**-4)


def test_a_piece_that_the_device_refuses_is_held_in_smaller_ones(card: Card) -> None:
    free = card(10, largest_piece=2**29)
    with ballast.held(8, sys.executable, settles=1):
        assert left(free) == pytest.approx(8, abs=2**-4)


def test_a_card_that_is_too_small_is_an_error_that_says_what_is_free(card: Card) -> None:
    card(79.2, others=75, ends_after=1e9)
    said = r"8 GiB of the GPU cannot be left free: 4\.20 of 79\.20 GiB are"
    with pytest.raises(ServerError, match=said), ballast.held(8, sys.executable, settles=0.5):
        pytest.fail("the ballast began")


def test_less_than_nothing_is_an_error_before_a_process_starts() -> None:
    with pytest.raises(ServerError, match="holds more than the card has"), ballast.held(-4, "no interpreter"):
        pytest.fail("the ballast began")


def test_an_interpreter_without_a_gpu_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('no NVIDIA driver')", "utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ServerError, match="no NVIDIA driver"), ballast.held(8, sys.executable):
        pytest.fail("the ballast began")
