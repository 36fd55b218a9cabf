"""The worker processes: how they start, and that nothing is left of them when they end."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from torch._inductor import config as inductor_config

from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.backends.inductor.compiler import job, pool, process, worker
from compile_cache.backends.inductor.compiler.failures import (
    HungError,
    KilledError,
    NotCompiledError,
    OtherEnvironmentError,
)
from compile_cache.backends.inductor.compiler.pool import worker_count
from scripts.places import ROOT

from .....programs import wait_for
from ....rig import TOLERANCE, Model, Rig, inputs, seeded

CPU = torch.device("cpu")


def serve(program: Any, folder: str) -> None:
    """A child that answers with its process id, and ends as a job says."""
    with contextlib.suppress(EOFError):
        while True:
            what = program.recv()
            if what == "crash":
                os._exit(1)
            if what == "hang":
                threading.Event().wait()
            program.send((os.getpid(), 0.5))


class Served:
    """Two children, with jobs 0, 1 and so on. `ended`: the program would end, because all children did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs: worker.Jobs = queue.SimpleQueue()
        self.replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.ended = threading.Event()
        monkeypatch.setattr(worker, "_end", lambda folder: self.ended.set())
        before = set(multiprocessing.active_children())
        children = [worker._start_child(serve, "folder") for _ in range(2)]
        self.processes = set(multiprocessing.active_children()) - before

        def reply(*message: Any) -> None:
            self.replies.put(message)

        threading.Thread(target=worker._serve_all, args=(children, self.jobs, reply, "folder"), daemon=True).start()

    def answers(self, *jobs: str) -> dict[int, Any]:
        for number, each in enumerate(jobs):
            self.jobs.put((number, each))  # type: ignore[arg-type]
        return {number: made for number, made, _ in (self.replies.get(timeout=60) for _ in jobs)}

    def end(self) -> None:
        for each in self.processes:
            each.kill()
        for _ in self.processes:  # a thread that waits for a job sees the end of its child when it has one
            self.jobs.put((99, {}))
        assert self.ended.wait(60)


def test_a_child_that_crashes_costs_only_the_job_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch)
    answers = served.answers("crash", *["a job"] * 5)
    assert answers.pop(0) == "the process that compiled it ended"
    assert len(set(answers.values())) == 1, "by the other child"
    assert not served.ended.is_set()
    served.end()


def test_a_child_that_hangs_is_ended_and_costs_only_the_job_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(worker, "SILENT_SECONDS", 0.3)
        assert served.answers("hang") == {0: "the process that compiled it hung, and was ended"}
    assert len(set(served.answers(*["a job"] * 5).values())) == 1, "by the other child"
    assert not served.ended.is_set()
    served.end()


@pytest.mark.parametrize(
    ("seconds", "hangs"),  # of processor time, at each look without an answer
    [
        ([7.0], False), ([7.0, 7.0], True), ([7.0, 7.01, 7.02, 7.03], False), ([7.0, 90.0, 90.0], True),
        ([7.0, 500.0, 600.0, 607.0], False), ([7.0, 500.0, 608.0], True), ([90.0, 60.0, 61.0], False),
    ],
)  # fmt: skip
def test_a_hang_is_judged_by_processor_time(monkeypatch: pytest.MonkeyPatch, seconds: list[float], hangs: bool) -> None:
    looks = list(seconds)
    monkeypatch.setattr(worker, "processor_seconds", lambda number: looks.pop(0))
    child: Any = SimpleNamespace(poll=lambda wait: not looks)
    assert worker._answers(child, SimpleNamespace(pid=1)) is not hangs  # type: ignore[arg-type]


STARTS = """
import subprocess, sys
busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
print(busy.pid, flush=True)
busy.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="stops processes")
def test_processor_time_is_that_of_all_that_a_process_started() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        busy = psutil.Process(int(process.stdout.readline()))
        before = worker.processor_seconds(process.pid)
        wait_for(lambda: worker.processor_seconds(process.pid) > before)
        for each in (busy, psutil.Process(process.pid)):
            each.suspend()
            wait_for(lambda each=each: each.status() == psutil.STATUS_STOPPED)  # type: ignore[misc]
        assert worker.processor_seconds(process.pid) == worker.processor_seconds(process.pid) > 0
        process.kill()
        busy.kill()
    assert worker.processor_seconds(process.pid) == 0


def test_a_child_that_is_killed_while_it_has_no_job_costs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch)
    lost, other = served.processes
    lost.kill()
    lost.join()
    assert set(served.answers(*["a job"] * 5).values()) == {other.pid}
    served.end()


def test_without_any_child_the_program_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the prompt would wait for them until they count as hung."""
    served = Served(monkeypatch)
    assert set(served.answers("crash", "crash").values()) == {"the process that compiled it ended"}
    assert served.ended.wait(60)


def test_the_program_ends_with_a_main_process_that_was_killed_within_a_message(tmp_path: Path) -> None:
    message = pickle.dumps((1, {"trace": b"a job"}))
    program = subprocess.Popen([sys.executable, worker.__file__, str(tmp_path)], stdin=subprocess.PIPE)
    assert program.stdin is not None
    with program.stdin as stream:
        stream.write(pickle.dumps((1, "cpu", False)) + message[:-4])
    assert program.wait(100) == 0


# As Windows and macOS start children: each imports the program's file, and then `job`.
SPAWNS = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from compile_cache.backends.inductor.compiler import worker
worker._CAN_FORK = False
if __name__ == "__main__":
    worker.main()
"""


@pytest.mark.long
def test_children_that_are_spawned_compile_too(
    program: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program(SPAWNS)
    one = Rig(InductorBackend(), workers=2)
    with caplog.at_level(logging.INFO), one.expect(region_compiles=2, verifications=2, region_calls=4, graph_calls=1):
        assert one.bind(seeded(Model)).error(*inputs()) <= TOLERANCE
    one.backend.workers.close()  # type: ignore[attr-defined]
    assert "no worker compiled" not in caplog.text


def test_every_step_before_the_fork_works_with_this_torch(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger=job.logger.name):
        job.before_fork()
        job.before_fork_for("cpu")
    messages = [record.getMessage() for record in caplog.records if record.name == job.logger.name]
    assert not messages, "a step failed; only this test shows it, because the children then do it themselves"


def test_a_step_that_this_torch_lacks_costs_no_other_step(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(job, "torch_key", None)
    monkeypatch.setattr(job, "init_backend_registration", lambda: done.append("registration"))
    monkeypatch.setattr(job, "pick_vec_isa", lambda: done.append("instructions"))
    job.before_fork()
    job.before_fork_for("cuda")
    job.before_fork_for("cpu")
    assert done == ["registration", "instructions"], "the latter once, for the CPU"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes the pool run this program instead of worker.py. Returns the folder for temporary files."""

    def run(code: str) -> Path:
        (tmp_path / "program.py").write_text(code)
        monkeypatch.setattr(worker, "__file__", str(tmp_path / "program.py"))
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        return temporary

    return run


def test_processes_that_are_killed_leave_no_file_behind(program: Callable[[str], Path]) -> None:
    temporary = program("import pathlib, sys, time; pathlib.Path(sys.argv[1], 'half').mkdir(); time.sleep(600)")
    processes = pool.WorkerPool()
    processes.start()
    wait_for(lambda: list(temporary.glob("*/half")) != [])
    processes.close()
    wait_for(lambda: list(temporary.iterdir()) == [])


def test_processes_that_end_by_themselves_leave_no_thread_and_no_pipe(program: Callable[[str], Path]) -> None:
    program("import time; time.sleep(1)")  # it is seen before it ends
    processes = pool.WorkerPool()

    def left() -> set[object]:
        """Threads, and what is open: earlier tests left some of both, which may go at any moment."""
        opened = set[object]()
        for each in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the folder itself is closed by now
                opened.add(os.readlink(each))
        return opened.union(threading.enumerate())

    before = left()
    for _ in range(3):
        processes.start()
        assert left() - before, "neither a thread nor a pipe of it is seen"
        wait_for(lambda: not processes.running)
    processes.close()
    wait_for(lambda: left() <= before)


# It answers once it was asked: what comes before is for no job.
ANSWER = """
import pickle, sys, time
for _ in ("the number of children", "the job"):
    pickle.load(sys.stdin.buffer)
def answer(message):
    pickle.dump(message, sys.stdout.buffer)
    sys.stdout.buffer.flush()
"""
HANGS = ANSWER + "time.sleep(600)"
WORKS = ANSWER + "answer((0, 'no compiler', 0.5)); time.sleep(600)"


def failure_of_a_job(processes: pool.WorkerPool) -> BaseException | None:
    with processes.in_use(2, CPU):
        return processes.submit(SimpleNamespace()).exception(60)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "error", "match"),
    [
        (HANGS, NotCompiledError, "hung"),
        ("raise SystemExit", NotCompiledError, "ended"),
        ("print('Traceback (most recent call last)')", NotCompiledError, "nonsense"),
        (ANSWER + "answer((99, 'of no job', 0.0)); time.sleep(600)", NotCompiledError, "nonsense"),
        (ANSWER + "answer((0, {'unknown': 1}, 0.5)); time.sleep(600)", NotCompiledError, "nonsense"),
    ],
    ids=["hangs", "dies", "writes text", "answers for another job", "answers no artifact"],
)
def test_processes_that_fail_are_ended_and_the_next_ones_work(
    program: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, code: str, error: type[Exception], match: str
) -> None:
    temporary = program(code)
    processes = pool.WorkerPool()
    with monkeypatch.context() as patch:
        if code is HANGS:
            patch.setattr(worker, "SILENT_SECONDS", 0.3)
        failure = failure_of_a_job(processes)
    assert type(failure) is error
    assert match in str(failure)
    assert not processes.running
    wait_for(lambda: list(temporary.iterdir()) == [])
    Path(worker.__file__).write_text(WORKS)
    assert str(failure_of_a_job(processes)) == "no compiler"
    processes.close()


@pytest.mark.parametrize(("answer", "error"), [(worker.ENDED, KilledError), (worker.HUNG, HungError)])
def test_a_job_whose_child_ended_says_so(
    program: Callable[[str], Path], answer: str, error: type[NotCompiledError]
) -> None:
    program(ANSWER + f"answer((0, {answer!r}, 0.0)); time.sleep(600)")
    processes = pool.WorkerPool()
    assert type(failure_of_a_job(processes)) is error
    processes.close()


def test_a_second_device_gets_children_of_its_own_once_the_first_ones_are_idle(
    program: Callable[[str], Path],
) -> None:
    program("import time; time.sleep(600)")
    processes = pool.WorkerPool()
    with processes.in_use(1, CPU):
        first = processes.start()
        with processes.in_use(1, torch.device("cpu", 1)):
            assert processes.start() is first, "a caller uses them"
    with processes.in_use(1, torch.device("cpu", 1)):
        second = processes.start()
    assert second is not first
    assert not first.alive
    with processes.in_use(1, torch.device("cpu", 1)):
        assert processes.start() is second
    processes.close()


def children_of(parent: int) -> list[int]:
    found = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if int(each.read_text("utf-8").rpartition(")")[2].split()[1]) == parent:
                found.append(int(each.parent.name))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="finds the child in /proc")
def test_they_have_a_low_priority() -> None:
    processes = pool.WorkerPool()
    with processes.in_use(1, CPU):
        program = processes.start()._process.pid
        answer = processes.submit(job.Job("key", "label", b"", (), True, {})).exception(600)
        assert type(answer) is NotCompiledError, "the child lives"
        (child,) = children_of(program)
        own = os.getpriority(os.PRIO_PROCESS, 0)
        for each in (program, child):
            assert os.getpriority(os.PRIO_PROCESS, each) - own == worker._NICE
        group = Path(f"/proc/{child}/autogroup")
        if group.exists():  # not in each kernel
            assert group.read_text("utf-8").split()[-1] == str(worker._NICE)
    processes.close()


def test_on_windows_they_open_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"CREATE_NO_WINDOW": 0x08000000, "BELOW_NORMAL_PRIORITY_CLASS": 0x4000}
    for name, value in flags.items():
        monkeypatch.setattr(subprocess, name, value, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert process._creation_flags() == 0
    monkeypatch.setattr(sys, "platform", "win32")
    assert process._creation_flags() == 0x08004000


@pytest.mark.skipif(not hasattr(inductor_config, "deterministic"), reason="this inductor has no such setting")
def test_a_worker_takes_on_deterministic_algorithms_that_inductor_was_not_told_of() -> None:
    with mock.patch.object(inductor_config, "deterministic", False):
        torch._C._set_deterministic_algorithms(True, warn_only=True)
        try:
            settings = job.settings_for(CPU)
        finally:
            torch._C._set_deterministic_algorithms(False)
    assert settings["flags"]["deterministic"]
    processes = pool.WorkerPool()
    with processes.in_use(1, CPU):
        answer = processes.submit(job.Job("key", "label", b"", (), True, settings)).exception(600)
    assert type(answer) is NotCompiledError, "it came as far as the graph"
    processes.close()


@pytest.mark.parametrize("part", ["environment", "flags"])
def test_a_worker_that_cannot_take_on_the_settings_says_which(part: str) -> None:
    settings = job.settings_for(CPU)
    if part == "environment":
        settings[part] = [(name, "of another processor" if name == "device" else own) for name, own in settings[part]]
    else:
        settings[part] = {**settings[part], "unknown": True}
    processes = pool.WorkerPool()
    with processes.in_use(1, CPU):
        answer = processes.submit(job.Job("key", "label", b"", (), True, settings)).exception(600)
    assert type(answer) is OtherEnvironmentError
    assert "of another processor" in str(answer) or "'unknown': True" in str(answer)
    processes.close()


def test_a_job_that_comes_after_the_process_ended_fails_at_once(program: Callable[[str], Path]) -> None:
    program("raise SystemExit")
    processes = pool.WorkerPool()
    with processes.in_use(2, CPU):
        wait_for(lambda: not processes.running)
        assert isinstance(processes.submit(SimpleNamespace()).exception(60), NotCompiledError)  # type: ignore[arg-type]
    processes.close()


def test_a_failed_job_returns_the_text_of_an_error_that_cannot_be_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        error = RuntimeError("no such compiler\nand a page of text")
        error.frame = sys._getframe()  # type: ignore[attr-defined]
        raise error

    monkeypatch.setattr(job, "_run", refuse)
    monkeypatch.setattr(job, "_apply", lambda: None)
    monkeypatch.setattr(job, "_applied", None)
    answer = job.work(vars(job.Job("key", "label", b"", (), True, {})))
    assert pickle.loads(pickle.dumps(answer))[0] == "RuntimeError: no such compiler"


@pytest.mark.parametrize(
    ("wanted", "processors", "memory", "count"),
    [
        *[(None, processors, 64, count) for processors, count in ((1, 1), (2, 1), (3, 1), (4, 2), (8, 6), (64, 16))],
        (None, 8, 5, 2), (None, 8, 1, 0),
        (0, 8, 64, 0), (1, 8, 64, 1), (3, 2, 1, 3), (61, 8, 64, 61), (1000, 8, 64, 61),
    ],
)  # fmt: skip
def test_their_number(
    monkeypatch: pytest.MonkeyPatch, wanted: int | None, processors: int, memory: int, count: int
) -> None:
    """memory: what is free, in GiB. No system can wait for more than 61."""
    monkeypatch.setattr(pool, "_processors", lambda: processors)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=memory << 30))
    assert worker_count(wanted) == count
