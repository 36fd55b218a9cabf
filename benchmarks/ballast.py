"""Device memory that another process holds. Without torch, so that Ray's environment can import it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

from scripts.errors import ServerError

_BALLAST = """
import sys, time, torch
held, want = [torch.zeros(1, device="cuda")], float(sys.argv[1]) * 2**30
for step in (2**30, 2**26, 2**22):
    while torch.cuda.mem_get_info()[0] - want > step:
        held.append(torch.empty(step, dtype=torch.uint8, device="cuda"))
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def held(gib: float | None, python: str | os.PathLike[str]) -> Iterator[None]:
    """Hold so much of the GPU that `gib` GiB are free; nothing for None. python: an interpreter with torch.

    Raises ServerError if the process ends before it holds that much.
    """
    if gib is None:
        yield
        return
    command = [os.fspath(python), "-c", _BALLAST, str(gib)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stderr is not None
    try:
        if process.stdout.readline().strip() != b"held":
            raise ServerError(
                f"The GPU's memory cannot be held: {process.stderr.read().decode(errors='replace')[-500:]}"
            )
        yield
    finally:
        process.stdin.close()
        process.wait()
