"""The worker processes: how they start, and that nothing is left of them when they end."""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compile_cache.backends.inductor.parallel import job, pool, worker
from compile_cache.backends.inductor.parallel.pool import worker_count
from scripts.places import ROOT

CPU = torch.device("cpu")

# What an initialised driver does in forked children. Spawned children get an empty list.
does: list[str] = []


def begin(device: str, folder: str, waiting: Any) -> None:
    if "starves" in does or ("starves one" in does and waiting.value == 0):
        with waiting.get_lock():
            waiting.value += 1
        time.sleep(600)
    if "refuses" in does:
        raise RuntimeError(f"{device} cannot be used in a forked process")
    if "hangs" in does:
        time.sleep(600)


def ready() -> None: ...


def start_method() -> str:
    return type(multiprocessing.process.current_process()).__name__


@pytest.fixture(params=["works", "refuses", "hangs"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(worker, "_READY_SECONDS", 2.0)
    does.append(request.param)
    yield request.param
    does.clear()


@pytest.mark.grid(2)
def test_children_are_spawned_if_the_driver_does_not_support_forks(driver: str) -> None:
    pool = worker._pool(SimpleNamespace(begin=begin, ready=ready), ("cuda:0", "folder"), 2)
    assert pool is not None
    try:
        forked = sys.platform == "linux" and driver == "works"
        assert pool.submit(start_method).result() == ("ForkProcess" if forked else "SpawnProcess")
        assert pool.submit(os.getpid).result() != os.getpid()
    finally:
        pool.shutdown()


@pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux")
def test_children_without_memory_on_the_gpu_leave_the_jobs_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_WAITING_SECONDS", 0.5)
    fakes, given = SimpleNamespace(begin=begin, ready=ready), ("cuda:0", "folder")
    monkeypatch.setitem(globals(), "does", ["starves one"])
    pool = worker._pool(fakes, given, 3)
    assert pool is not None
    assert [pool.submit(start_method).result(timeout=30) for _ in range(6)] == ["ForkProcess"] * 6
    worker._end_children()
    pool.shutdown(wait=False)
    monkeypatch.setitem(globals(), "does", ["starves"])
    assert worker._pool(fakes, given, 2) is None
    wait_for(lambda: not multiprocessing.active_children())  # the pool's own thread may be reaping one


@pytest.mark.parametrize("starving", [1, 2])
def test_spawned_children_without_memory_on_the_gpu_end(monkeypatch: pytest.MonkeyPatch, starving: int) -> None:
    """Otherwise the prompt would wait for them until they count as hung."""
    ended, submitted = threading.Event(), list[Any]()
    monkeypatch.setattr(worker, "_CAN_FORK", False)
    monkeypatch.setattr(worker, "_WAITING_SECONDS", 0.2)
    monkeypatch.setattr(worker, "_end", lambda folder: ended.set())
    children = SimpleNamespace(submit=submitted.append)
    monkeypatch.setattr(worker, "_started", lambda *given: (children, SimpleNamespace(value=starving)))
    assert worker._pool(SimpleNamespace(begin=begin, ready=ready), ("cuda:0", "folder"), 2) is children
    assert submitted == [ready, ready]
    assert ended.wait(30 if starving == 2 else 1) is (starving == 2)


def test_a_child_asks_for_memory_again_until_it_has_some(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    waiting, seen, answers = multiprocessing.Value("i", 0), [], [False, False, False, True]
    monkeypatch.setattr(job, "_has_context", lambda device: answers.pop(0))
    monkeypatch.setattr(job, "_end_with_parent", lambda: None)
    monkeypatch.setattr(job.time, "sleep", lambda seconds: seen.append(waiting.value))
    monkeypatch.setattr(job.lowering, "scratch", "")
    with job.inductor_config.patch(compile_threads=1):  # which begin sets; monkeypatch would leave it deleted
        job.begin("cuda:0", str(tmp_path), waiting)
    assert (answers, seen, waiting.value) == ([], [1, 1], 0)


@pytest.mark.parametrize("error", ["CUDA error: out of memory", "CUDA error: initialization error"])
def test_only_a_child_that_lacks_memory_asks_again(monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    """Another error of the driver ends it: it cannot use the device at all."""

    class EndedError(Exception):
        pass

    def fail(*given: Any, **named: Any) -> None:
        raise torch.AcceleratorError(error)

    def end(code: int) -> None:
        raise EndedError

    monkeypatch.setattr(job.torch, "zeros", fail)
    monkeypatch.setattr(job.os, "_exit", end)
    if "memory" in error:
        assert job._has_context("cuda:0") is False
    else:
        with pytest.raises(EndedError):
            job._has_context("cuda:0")


def lose_a_child(folder: str, children: Any) -> None:
    worker._pool(SimpleNamespace(begin=begin, ready=ready), ("cpu", folder), 2)
    children.put([child.pid for child in multiprocessing.active_children()])
    worker._end_with_a_child(folder)


def test_every_step_before_the_fork_works_with_this_torch_and_initialises_no_gpu(
    caplog: pytest.LogCaptureFixture,
) -> None:
    program = (
        "from compile_cache.backends.inductor.parallel import job; job.before_fork(); import torch; "
        "raise SystemExit(torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False, timeout=300)
    assert done.returncode == 0
    with caplog.at_level(logging.DEBUG, logger=job.logger.name):
        job.before_fork()
    messages = [record.getMessage() for record in caplog.records if record.name == job.logger.name]
    assert not messages, "a step failed; only this test shows it, because the children then do it themselves"


@pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux")
def test_a_process_that_lost_a_child_ends_with_the_others_even_without_a_job(tmp_path: Path) -> None:
    folder, fork = tmp_path / "folder", multiprocessing.get_context("fork")
    folder.mkdir()
    children = fork.SimpleQueue()
    process = fork.Process(target=lose_a_child, args=(str(folder), children))
    process.start()
    lost, other = children.get()
    os.kill(lost, signal.SIGKILL)
    process.join(60)
    assert process.exitcode == 0
    assert not folder.exists()
    wait_for(lambda: gone(other))


def gone(pid: int) -> bool:
    """Also a zombie, whose parent has not waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


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
    program("raise SystemExit")
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
import pickle, struct, sys, time
for _ in ("the number of children", "the job"):
    sys.stdin.buffer.read(struct.unpack(">Q", sys.stdin.buffer.read(8))[0])
def answer(message, raw=None):
    content = pickle.dumps(message) if raw is None else raw
    sys.stdout.buffer.write(struct.pack(">Q", len(content)) + content)
    sys.stdout.buffer.flush()
"""
HANGS = ANSWER + "time.sleep(600)"
WORKS = ANSWER + "answer((0, 'no compiler', 0.5)); time.sleep(600)"


def answers(processes: pool.WorkerPool) -> list[Any]:
    """What the pool gives for one job, number 7."""
    processes.prepare(2, CPU)
    return [each for each in processes.results([(7, SimpleNamespace())], SimpleNamespace()) if each]  # type: ignore[list-item, arg-type]


@pytest.mark.parametrize(
    ("code", "error", "match"),
    [
        (HANGS, pool.HungError, "no result for 0 s"),
        ("raise SystemExit", RuntimeError, "ended"),
        (
            "import sys; sys.stdout.buffer.write(b'Traceback (most recent call last)'); sys.exit()",
            RuntimeError,
            "ended",
        ),
        (ANSWER + "answer(None, b'no pickle'); time.sleep(600)", RuntimeError, "ended"),
        (ANSWER + "answer('no result'); time.sleep(600)", RuntimeError, "ended"),
        (ANSWER + "answer((99, 'of no job', 0.0)); time.sleep(600)", RuntimeError, "ended"),
    ],
    ids=["hangs", "dies", "writes text", "writes no pickle", "answers no result", "answers for another job"],
)
def test_processes_that_fail_are_ended_and_the_next_ones_work(
    program: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, code: str, error: type[Exception], match: str
) -> None:
    temporary = program(code)
    processes = pool.WorkerPool()
    with monkeypatch.context() as patch:
        if error is pool.HungError:
            patch.setattr(pool, "_SILENT_SECONDS", 0.3)
        with pytest.raises(error, match=match) as raised:
            answers(processes)
    if isinstance(raised.value, pool.HungError):
        assert raised.value.numbers == {7}
    assert not processes.running
    wait_for(lambda: list(temporary.iterdir()) == [])
    Path(worker.__file__).write_text(WORKS)
    assert answers(processes) == [(7, "no compiler", 0.5)]
    processes.close()


def test_a_result_that_is_no_artifact_is_a_failure_of_its_job_alone(program: Callable[[str], Path]) -> None:
    program(ANSWER + "answer((0, {'key': 'a', 'unknown': 1}, 0.5)); time.sleep(600)")
    processes = pool.WorkerPool()
    ((number, why, _),) = answers(processes)
    assert number == 7
    assert "answered nonsense" in why
    assert processes.running
    processes.close()


def test_a_failed_job_returns_the_text_of_an_error_that_cannot_be_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        error = RuntimeError("no such compiler\nand a page of text")
        error.frame = sys._getframe()  # type: ignore[attr-defined]
        raise error

    monkeypatch.setattr(job, "_run", refuse)
    monkeypatch.setattr(job, "_apply", lambda settings: None)
    monkeypatch.setattr(job, "_applied", None)
    settings = vars(job.WorkerSettings("cpu", {}, {}, ""))
    answer = job.work(settings, vars(job.Job("key", "label", b"", (), (), (), "", True)))
    assert pickle.loads(pickle.dumps(answer))[0] == "RuntimeError: no such compiler"


def test_there_are_never_more_than_any_system_can_wait_for() -> None:
    assert [worker_count(wanted, CPU) for wanted in (1, 2, 61, 1000)] == [0, 2, 61, 61]


@pytest.mark.parametrize(("free_gib", "count"), [(3.0, 0), (6.0, 0), (7.0, 2), (12.0, 5), (140.0, 8)])
def test_their_number_is_what_fits_on_the_gpu_beside_the_prompt(
    monkeypatch: pytest.MonkeyPatch, free_gib: float, count: int
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free_gib * 2**30), 140 << 30))
    assert worker_count(8, torch.device("cuda:0")) == count


def test_fewer_start_if_weights_took_the_memory_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    process = SimpleNamespace(alive=True, start_children=lambda count, device: started.append(count), end=lambda: None)
    monkeypatch.setattr(pool, "WorkerProcess", lambda: process)
    processes = pool.WorkerPool()
    for free_gib in (12, 7, 1):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free_gib: (free << 30, 140 << 30))
        processes.prepare(5, torch.device("cuda:0"))
    processes.prepare(3, torch.device("cuda:0"), has_room=True)
    processes.close()
    assert started == [5, 2, 1, 3]


@pytest.mark.parametrize("is_busy", [False, True])
def test_processes_that_have_jobs_for_a_later_call_keep_their_memory(
    monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    ended: list[bool] = []
    process = SimpleNamespace(
        alive=True, is_busy=is_busy, start_children=lambda *given: None, end=lambda: ended.append(True)
    )
    monkeypatch.setattr(pool, "WorkerProcess", lambda: process)
    processes = pool.WorkerPool()
    processes.prepare(1, CPU)
    processes.end_unless_busy()
    assert processes.running is is_busy
    processes.close()
    assert ended == [True]


@pytest.mark.parametrize(("pages_gib", "count"), [(0, 0), (4, 0), (6, 1), (8, 2), (11, 4), (20, 8)])
def test_pages_count_as_free_and_one_process_is_better_than_none(
    monkeypatch: pytest.MonkeyPatch, pages_gib: int, count: int
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 28, 140 << 30))
    assert worker_count(8, torch.device("cuda:0"), pages_gib << 30) == count
    assert worker_count(1, torch.device("cuda:0"), pages_gib << 30) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux")
def test_a_child_that_cannot_use_its_gpu_ends_without_a_traceback(tmp_path: Path) -> None:
    given = io.BytesIO()
    worker.send(given, (2, "cuda:99"))
    command = [sys.executable, str(worker.__file__), str(tmp_path / "folder")]
    done = subprocess.run(command, input=given.getvalue(), capture_output=True, check=False, timeout=300)
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr
