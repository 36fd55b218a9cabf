"""A ballast leaves the memory that was asked for, also while a server that ended still gives memory back.

Its process runs eagerly, with a torch whose device is a file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import ballast
from scripts.errors import ServerError

# others: GiB of a process that ends after so many seconds. largest_piece: bytes.
CARD = {"total": 79.2, "others": 0.0, "ends_after": 0.0, "largest_piece": 2.0**40}
TORCH = """
import pathlib, time

GIB = 2**30
STATE = {state!r}
held, began = 0, time.monotonic()
uint8 = "uint8"

class cuda:
    @staticmethod
    def mem_get_info():
        others = STATE["others"] if time.monotonic() - began < STATE["ends_after"] else 0.0
        free = int((STATE["total"] - others) * GIB) - held
        pathlib.Path({place!r}).write_text(str(free))
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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def make_card(folder: Path, **state: float) -> None:
    text = TORCH.format(place=str(folder / "free"), state={**CARD, **state})
    (folder / "torch.py").write_text(text, "utf-8")


REFUSING = {"total": 10, "largest_piece": 2**29}  # a piece that the device refuses is held in smaller ones
# What another process gives back late is held too: less than the card is free, then more than was left.
LATE = [{"others": 75.0, "ends_after": 0.6}, {"others": 30.0, "ends_after": 0.6}]


@pytest.mark.parametrize("state", [{}, REFUSING, *LATE])
def test_it_leaves_what_was_asked_for(folder: Path, state: dict[str, float]) -> None:
    make_card(folder, **state)
    with ballast.held(8, sys.executable, settles=8 if state in LATE else 1):
        assert int((folder / "free").read_text()) / 2**30 == pytest.approx(8, abs=2**-4)


def test_a_card_that_is_too_small_is_an_error_that_says_what_is_free(folder: Path) -> None:
    make_card(folder, others=75, ends_after=1e9)
    said = r"8 GiB of the GPU cannot be left free: 4\.20 of 79\.20 GiB are"
    with pytest.raises(ServerError, match=said), ballast.held(8, sys.executable, settles=0.5):
        pytest.fail("the ballast began")
    with pytest.raises(ServerError, match="holds more than the card has"), ballast.held(-4, "no interpreter"):
        pytest.fail("the ballast began")


def test_an_interpreter_without_a_gpu_says_why(folder: Path) -> None:
    (folder / "torch.py").write_text("raise RuntimeError('no NVIDIA driver')", "utf-8")
    with pytest.raises(ServerError, match="no NVIDIA driver"), ballast.held(8, sys.executable):
        pytest.fail("the ballast began")
