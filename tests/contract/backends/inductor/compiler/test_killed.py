"""What a process that is killed while it compiles leaves behind: the regions that are done, and no folder for long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import torch

from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.config import CacheConfig
from compile_cache.telemetry.host_load import HostLoad
from scripts.places import ROOT

from .....programs import wait_for

Program = Callable[[str], "subprocess.Popen[str]"]

# It stops in inductor, while its first region is compiled.
IN_A_COMPILE = """
import sys
import torch._inductor.compile_fx as compile_fx

def stop(*args, **kwargs):
    print("compiling", flush=True)
    sys.stdin.read()

compile_fx.compile_fx_inner = stop
from pathlib import Path
from compile_cache.backends.inductor.backend import InductorBackend
from tests.contract.rig import Model, Rig, inputs, seeded

Rig(InductorBackend(), workers=0, store_folder=Path("STORE"), source="one").bind(seeded(Model))(*inputs())
"""

# Its workers start, and do nothing.
WITH_WORKERS = """
import sys
from pathlib import Path
from compile_cache.backends.inductor.compiler import pool, worker

program = Path("STORE")
program.write_text("import time; time.sleep(600)")
worker.__file__ = str(program)
workers = pool.WorkerPool()
workers.start()
print(workers._process._process.pid, flush=True)
sys.stdin.read()
"""

# It stops at its third trace, after a worker was done with the first.
AFTER_THE_FIRST = """
import sys, threading
from pathlib import Path
from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.backends.inductor.compiler import work, worker
from tests.contract.rig import Attention, Model, Rig, inputs, seeded

class Three(Model):
    def __init__(self):
        super().__init__()
        self.attentions[1] = Attention(16, eps=1e-3)

real_trace, real_receive = work.trace_of, worker.receive
received, traced, first_is_back = [], [], threading.Event()

def receive(stream):
    if received:  # the reader comes back for the next one
        first_is_back.set()
    received.append(real_receive(stream))
    return received[-1]

def trace(*args):
    traced.append(args)
    if len(traced) == 2:
        first_is_back.wait()
    if len(traced) == 3:
        print("third", flush=True)
        sys.stdin.read()
    return real_trace(*args)

work.trace_of, worker.receive = trace, receive
Rig(InductorBackend(), workers=2, store_folder=Path("STORE"), source="one").bind(seeded(Three))(*inputs())
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    """Starts a program with a temporary directory of its own, which this process uses too."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    started: list[subprocess.Popen[str]] = []

    def run(code: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", code.replace("STORE", (tmp_path / "store").as_posix())],
                cwd=ROOT,
                env={**os.environ, "TMPDIR": str(temporary), "TEMP": str(temporary), "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def left() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob("resolute-*"))


def start() -> None:
    backend = InductorBackend()
    backend.prewarm(torch.device("cpu"), CacheConfig(workers=0), HostLoad())
    assert backend._prewarming is not None
    backend._prewarming.join()


def test_a_kill_in_a_compile_leaves_a_folder_until_the_next_start(program: Program) -> None:
    process = program(IN_A_COMPILE)
    assert said(process) == "compiling"
    start()
    assert len(left()) == 1, "of a process that lives"
    process.kill()
    process.communicate()
    start()
    assert left() == []


# Its workers import for ever: the torch that they find sleeps.
WITH_IMPORTING_WORKERS = """
import os, sys
from pathlib import Path
from compile_cache.backends.inductor.compiler import pool

fake = Path("STORE") / "path"
fake.mkdir(parents=True)
(fake / "torch.py").write_text("import pathlib, time; pathlib.Path('STORE', 'imports').touch(); time.sleep(600)")
os.environ["PYTHONPATH"] = str(fake)
workers = pool.WorkerPool()
workers.start()
print(workers._process._process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a parent's number never changes there")
def test_workers_that_still_import_end_with_their_owner(program: Program, tmp_path: Path) -> None:
    process = program(WITH_IMPORTING_WORKERS)
    worker = psutil.Process(int(said(process)))
    wait_for(lambda: (tmp_path / "store" / "imports").exists())
    process.kill()
    process.communicate()
    wait_for(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, 300)
    assert left() == []


@pytest.mark.skipif(sys.platform == "win32", reason="kills two processes by a signal")
def test_so_does_a_kill_of_the_workers_and_their_owner(program: Program) -> None:
    process = program(WITH_WORKERS)
    worker = int(said(process))
    process.kill()
    os.kill(worker, signal.SIGKILL)
    process.communicate()
    assert len(left()) == 1
    start()
    assert left() == []


@pytest.mark.long
def test_a_region_that_is_done_is_kept_though_the_process_is_killed_while_it_traces_others(
    program: Program, tmp_path: Path
) -> None:
    process = program(AFTER_THE_FIRST)
    assert said(process) == "third"
    process.kill()
    process.communicate()
    assert len(list((tmp_path / "store").glob("*/*.region"))) >= 1
