"""A program that compiles traces in child processes: `python worker.py FOLDER`, jobs on stdin, answers on stdout.

The program itself imports torch and compiles nothing. Its children compile; on Linux they are forked, so they start
with all modules imported. The first message is their number and the device type. All run at low priority, and none
sees a GPU, so none uses GPU memory. They exit with the main process, and the program kills a child that hangs.
A pool of the standard library cannot replace it: it would run ComfyUI's main.py again in each child, and the children
would import the pack by the name of its folder in custom_nodes. So `WorkerProcess` starts this file by path, and
messages consist of plain types: the two sides import the same class under different module names.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any, NoReturn, cast

_CAN_FORK = sys.platform == "linux"
ENDED = "the process that compiled it ended"
HUNG = "the process that compiled it hung, and was ended"
# Hangs are detected by processor time: a working process uses some even on a slow machine, a hung process none.
SILENT_SECONDS = 120.0  # a process that uses no processor time for so long hangs
_MOST_SECONDS = 600.0  # the most processor time for a job; a usual job takes up to a minute
_LOOK_SECONDS = 0.5  # between two checks that the main process is alive
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_NICE = 10  # the niceness of our processes

Jobs = queue.SimpleQueue[tuple[int, dict[str, Any]]]  # job number and job
Child = tuple[Connection, BaseProcess]


def send(stream: IO[bytes], message: Any) -> None:
    pickle.dump(message, stream)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """The next message. Raises EOFError if the other side has ended, and any exception for malformed data."""
    return pickle.load(stream)


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not write between our messages
    folder, parent = sys.argv[1], os.getppid()
    _lower_priority()  # before the imports, which take longest
    own = Path(__file__).resolve()
    sys.path[:] = [str(own.parents[4]), *(path for path in sys.path if Path(path or ".").resolve() != own.parent)]
    os.environ.update(dict.fromkeys(_VISIBLE, ""))
    # Before torch 2.9, importing inductor starts a thread and processes of its own, and a fork needs a single thread.
    os.environ["TORCH_WARM_POOL"] = "0"
    with _ending_with(parent, folder):
        from compile_cache.backends.inductor.compiler import job

        if _CAN_FORK:
            job.before_fork()
    reply_lock = threading.Lock()

    def reply(*message: Any) -> None:
        with reply_lock:
            send(replies, message)

    jobs: Jobs = queue.SimpleQueue()
    try:
        with _ending_with(parent, folder):
            count, device = receive(sys.stdin.buffer)
            if _CAN_FORK:
                job.before_fork_for(device)
        gc.freeze()  # the collector skips imported objects, so forked children keep sharing their memory
        children = [_start_child(job.serve, folder) for _ in range(count)]  # before there are threads
        threading.Thread(target=_serve_all, args=(children, jobs, reply, folder), daemon=True).start()
        with _ending_with(parent, folder):
            while True:
                jobs.put(receive(sys.stdin.buffer))
    except Exception:  # noqa: BLE001 (the main process ended, perhaps in the middle of a message, which raises any class)
        _end(folder)


def _lower_priority() -> None:
    """Let programs of normal priority run first. On Windows `WorkerProcess` sets the priority."""
    if sys.platform == "win32":
        return
    os.nice(_NICE)
    # Linux (autogroup) divides processors among sessions first; niceness only counts within our own session.
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(_NICE), "utf-8")


@contextlib.contextmanager
def _ending_with(parent: int, folder: str) -> Iterator[None]:
    """Inside this block, a thread exits the program soon after its parent ends: also during an import, or if another
    child of the parent keeps our pipe open. The thread stops before children are forked.

    Linux has PR_SET_PDEATHSIG for this, but it fires when the parent's thread that started the program ends, not the
    parent. Windows never changes the parent's process id: there only the closed pipe shows that the parent ended.
    """
    done = threading.Event()

    def look() -> None:
        while not done.wait(_LOOK_SECONDS):
            if os.getppid() != parent:
                _end(folder)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _start_child(serve: Callable[..., None], folder: str) -> Child:
    """Start a child. Returns a connection, which closes with the child (only it has the other end), and the process."""
    context: Any = multiprocessing.get_context("fork" if _CAN_FORK else "spawn")
    ours, childs = context.Pipe()
    process = context.Process(target=serve, args=(childs, folder))
    process.start()
    childs.close()
    return cast(Connection, ours), process


def _serve_all(children: list[Child], jobs: Jobs, reply: Callable[..., None], folder: str) -> None:
    """Dispatch jobs until all children have ended; then exit the program, so that no job waits forever."""
    with ThreadPoolExecutor(len(children)) as threads:
        for child in children:
            threads.submit(_serve, *child, jobs, reply)
    _end(folder)


def _serve(child: Connection, process: BaseProcess, jobs: Jobs, reply: Callable[..., None]) -> None:
    """Dispatch one job after the other to a child until it ends or hangs, which fails only its current job."""
    while True:
        number, job = jobs.get()
        try:
            child.send(job)
        except OSError:  # the child ended before it got the job
            jobs.put((number, job))
            return
        try:
            if not _answers(child, process):
                process.kill()
                reply(number, HUNG, 0.0)
                return
            answer = child.recv()
        except (EOFError, OSError):
            reply(number, ENDED, 0.0)
            return
        reply(number, *answer)


def _answers(child: Connection, process: BaseProcess) -> bool:
    """Wait until a child answers or ends. Returns False if the child hangs."""
    begun = used = processor_seconds(process.pid)
    while not child.poll(SILENT_SECONDS):
        before, used = used, processor_seconds(process.pid)
        if used == before or used - begun > _MOST_SECONDS:
            return False
    return True


def processor_seconds(number: int | None) -> float:
    """The processor seconds of a process and its descendants; without psutil the monotonic clock."""
    try:
        import psutil  # type: ignore[import-untyped]  # ComfyUI requires it
    except ImportError:
        return time.monotonic()
    used = 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(number)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # the process ended meanwhile
                used += sum(each.cpu_times()[:4])  # its own time, and that of children it has reaped
    return used


def _end(folder: str) -> NoReturn:
    children = multiprocessing.active_children()
    for child in children:
        child.kill()
    for child in children:
        child.join(1.0)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # a normal exit would wait for the children's threads


if __name__ == "__main__":
    main()
