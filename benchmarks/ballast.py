"""Occupy device memory with another process. Imports no torch, so that Ray's environment can import it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

from scripts.errors import ServerError

SETTLES = 10.0  # seconds until the memory of a process that just ended is free again

# The memory of a process that ended is free only seconds later: at first too little is free, or more becomes free after
# the allocation. So the script polls until the free memory is stable. It retries a refused piece in smaller ones.
_BALLAST = """
import sys, time, torch
want, settles = float(sys.argv[1]) * 2**30, float(sys.argv[2])
torch.cuda.set_device(int(sys.argv[3]))
held = [torch.zeros(1, device="cuda")]

def free():
    return torch.cuda.mem_get_info()[0]

def hold():
    for step in (2**30, 2**26, 2**22):
        while free() - want > step:
            try:
                held.append(torch.empty(step, dtype=torch.uint8, device="cuda"))
            except RuntimeError:
                break

began = since = time.monotonic()
before = None
while time.monotonic() - began < settles:
    hold()
    now = free()
    if now != before:
        before, since = now, time.monotonic()
    elif abs(now - want) <= 2**26 and time.monotonic() - since > settles / 8:
        break
    time.sleep(settles / 100)
print("held" if abs(free() - want) <= 2**26 else f"{free() / 2**30:.2f} of {torch.cuda.mem_get_info()[1] / 2**30:.2f}")
sys.stdout.flush()
sys.stdin.read()
"""


@contextlib.contextmanager
def occupy_memory(
    gib: float | None, python: str | os.PathLike[str], settles: float = SETTLES, card: int = 0
) -> Iterator[None]:
    """Allocate GPU memory until `gib` GiB are free, to 64 MiB; none if None. python: an interpreter with torch.
    card: the GPU's number among those that this process sees.

    Raises ServerError if that is not possible: at once unless `gib` is positive, else after `settles` seconds.
    """
    if gib is None:
        yield
        return
    if gib <= 0:
        raise ServerError(f"A card with {gib:.2f} GiB free is none: something that runs holds more than the card has.")
    command = [os.fspath(python), "-c", _BALLAST, str(gib), str(settles), str(card)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stderr is not None
    try:
        answer = process.stdout.readline().decode().strip()
        if not answer:
            raise ServerError(
                f"The GPU's memory cannot be held: {process.stderr.read().decode(errors='replace')[-500:]}"
            )
        if answer != "held":
            raise ServerError(
                f"{gib:g} GiB of the GPU cannot be left free: {answer} GiB are. Another process holds memory: end it."
            )
        yield
    finally:
        process.stdin.close()
        process.wait()
