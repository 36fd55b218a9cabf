"""Threads that trace and end leave no stand-in for CUDA's devices behind that the next trace would read.

In a process of its own, because a fault ends it.
"""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from compile_cache.torch_compat import fake_devices

from ...programs import run_python

# The thread's memory is overwritten, so that a use of what was freed shows at once.
PROGRAM = """
import ctypes, threading
{first}
from torch._subclasses.fake_tensor import FakeTensorMode

def trace():
    with FakeTensorMode():
        pass

for _ in range(3):
    thread = threading.Thread(target=trace)
    thread.start()
    thread.join()
    allocate = ctypes.CDLL(None).malloc
    allocate.restype = ctypes.c_void_p
    for size in (8, 16, 24, 32) * 500:
        ctypes.memset(allocate(size), 0x41, size)
    trace()
print("alive")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the program takes malloc from the C library")
@pytest.mark.parametrize(
    "first",
    [
        "from compile_cache.backends.inductor.backend import InductorBackend; InductorBackend()",
        "from compile_cache.torch_compat import fake_devices; fake_devices.keep(); fake_devices.keep()",
    ],
    ids=["backend", "pack"],
)
def test_a_trace_after_a_thread_that_traced_has_ended(first: str) -> None:
    assert run_python(PROGRAM.format(first=first)) == "alive\n"


def test_a_torch_that_refuses_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("no device guard")

    monkeypatch.setattr(fake_devices, "register_fake_devices", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    call = threading.Thread(target=fake_devices.keep.__wrapped__, daemon=True)
    call.start()
    call.join(30)
    assert not call.is_alive()
