"""A ballast leaves the memory that was asked for, also while a server that ended still gives memory back.

Its process has a torch whose device is a file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import ballast
from scripts.errors import ServerError

# GiB of the card and of another process, the seconds until that ends, and the bytes of the largest piece to be had.
CARD = {"total": 79.2, "others": 0.0, "ends_after": 0.0, "piece": 2.0**40}
TORCH = """
import pathlib, time
held, began, uint8, card = 0, time.monotonic(), "uint8", 0
class cuda:
    def set_device(number):
        global card
        card = number
    def mem_get_info():
        free = int(({total} - {others} * (time.monotonic() - began < {ends_after})) * 2**30) - held
        pathlib.Path(f"{{{place!r}}}-{{card}}").write_text(str(free))
        return free, int({total} * 2**30)
def empty(size, dtype, device):
    global held
    if size > min({piece}, cuda.mem_get_info()[0]):
        raise RuntimeError("CUDA out of memory")
    held += size
    return size
def zeros(count, device):
    return empty(2**21, "", device)
"""
# What another process gives back late is held too: less than the card is free, then more than was left.
LATE = [{"others": 75.0, "ends_after": 0.6}, {"others": 30.0, "ends_after": 0.6}]


@pytest.mark.parametrize("state", [{}, {"total": 10, "piece": 2**29}, *LATE])
def test_it_leaves_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: dict[str, float]) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "torch.py").write_text(TORCH.format(place=str(tmp_path / "free"), **{**CARD, **state}), "utf-8")
    with ballast.occupy_memory(8, sys.executable, settles=8 if state in LATE else 1):
        assert int((tmp_path / "free-0").read_text()) / 2**30 == pytest.approx(8, abs=2**-4)


def test_it_holds_memory_of_the_named_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "torch.py").write_text(TORCH.format(place=str(tmp_path / "free"), **CARD), "utf-8")
    with ballast.occupy_memory(8, sys.executable, settles=1, card=1):
        assert [file.name for file in tmp_path.glob("free-*")] == ["free-1"]


FULL = TORCH.format(place="free", **{**CARD, "others": 75.0, "ends_after": 1e9})
WHY = r"8 GiB of the GPU cannot be left free: 4\.20 of 79\.20 GiB are"
NONE = "raise RuntimeError('no NVIDIA driver')"


@pytest.mark.parametrize(
    ("code", "gib", "why"), [(FULL, 8, WHY), (FULL, -4, "holds more than the card has"), (NONE, 8, "no NVIDIA driver")]
)
def test_what_cannot_be_left_free_is_an_error_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, gib: float, why: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("torch.py").write_text(code, "utf-8")
    with pytest.raises(ServerError, match=why), ballast.occupy_memory(gib, sys.executable, settles=0.5):
        pytest.fail("the ballast began")
