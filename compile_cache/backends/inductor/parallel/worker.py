"""A program that compiles traces in child processes: `python worker.py FOLDER`, jobs by stdin, answers by stdout.

The program itself imports torch and compiles nothing. Its children compile; on Linux they are forked and so start with
everything imported. The first message gives their number and the type of device. All have a low priority.
None of them sees a GPU, so none takes memory of one. They end with the main process, and a child that hangs is ended.
A pool of the standard library cannot replace it: that would run ComfyUI's main.py again in each child, and its children
would import the pack by the name of its folder in custom_nodes. So `WorkerProcess` starts this file by path, and
messages have plain types only: the two sides import the same class under different module names.
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
# A hang is judged by processor time: a slow machine gives little of it to a process that works, and none to one that
# hangs.
SILENT_SECONDS = 120.0  # that a process may use none of it
_MOST_SECONDS = 600.0  # of it, for a job; a usual one takes up to a minute
_LOOK_SECONDS = 0.5  # between two looks for the main process
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_NICE = 10  # of processes of low priority

Jobs = queue.SimpleQueue[tuple[int, dict[str, Any]]]  # number and job
Child = tuple[Connection, BaseProcess]


def send(stream: IO[bytes], message: Any) -> None:
    pickle.dump(message, stream)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """The next message. Raises EOFError if the other side ended, and anything for what is no message."""
    return pickle.load(stream)


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not write between our messages
    folder, parent = sys.argv[1], os.getppid()
    _lower_priority()  # before the imports: these take longest
    own = Path(__file__).resolve()
    sys.path[:] = [str(own.parents[4]), *(path for path in sys.path if Path(path or ".").resolve() != own.parent)]
    os.environ.update(dict.fromkeys(_VISIBLE, ""))
    # Before torch 2.9, importing inductor starts a thread and processes of its own, and a fork needs a single thread.
    os.environ["TORCH_WARM_POOL"] = "0"
    with _ending_with(parent, folder):
        from compile_cache.backends.inductor.parallel import job

        if _CAN_FORK:
            job.before_fork()
    one_at_a_time = threading.Lock()

    def reply(*message: Any) -> None:
        with one_at_a_time:
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
    """Let programs of usual priority run first. On Windows `WorkerProcess` does it."""
    if sys.platform == "win32":
        return
    os.nice(_NICE)
    # Linux shares processors among sessions first: there the number counts within the session, which is our own.
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(_NICE), "utf-8")


@contextlib.contextmanager
def _ending_with(parent: int, folder: str) -> Iterator[None]:
    """Meanwhile end the program soon after its parent, also while it imports, or where a process that was forked from
    the parent keeps our pipe open. Stops its thread before children are forked.

    Linux could do that by itself (PR_SET_PDEATHSIG), but takes the end of the parent's thread that started the program
    for that of the parent. Windows never changes the parent's number: there only the end of the pipe shows it.
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
    """Start a child. Returns the connection to it, which ends with it: no other process has the child's side."""
    context: Any = multiprocessing.get_context("fork" if _CAN_FORK else "spawn")
    ours, childs = context.Pipe()
    process = context.Process(target=serve, args=(childs, folder))
    process.start()
    childs.close()
    return cast(Connection, ours), process


def _serve_all(children: list[Child], jobs: Jobs, reply: Callable[..., None], folder: str) -> None:
    """Give the children jobs until all have ended; then end the program, so that no job waits for them."""
    with ThreadPoolExecutor(len(children)) as threads:
        for child in children:
            threads.submit(_serve, *child, jobs, reply)
    _end(folder)


def _serve(child: Connection, process: BaseProcess, jobs: Jobs, reply: Callable[..., None]) -> None:
    """Give a child one job after the other until it ends or hangs, which costs no job but the one that it has."""
    while True:
        number, job = jobs.get()
        try:
            child.send(job)
        except OSError:  # it ended before
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
    """Wait until a child answers or ends. Returns False if it hangs."""
    begun = used = processor_seconds(process.pid)
    while not child.poll(SILENT_SECONDS):
        before, used = used, processor_seconds(process.pid)
        if used == before or used - begun > _MOST_SECONDS:
            return False
    return True


def processor_seconds(number: int | None) -> float:
    """The processor time that a process and all that it started have used, in seconds; without psutil the time."""
    try:
        import psutil  # type: ignore[import-untyped]  # ComfyUI requires it
    except ImportError:
        return time.monotonic()
    used = 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(number)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                used += sum(each.cpu_times()[:4])  # its own, and that of those which it waited for
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
