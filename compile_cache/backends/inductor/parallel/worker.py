"""Processes that compile traces for another one: `python worker.py FOLDER`, jobs on stdin, artifacts on stdout.

This one imports torch and compiles nothing: children do, which on Linux begin with what is imported by then. How many,
and for which device, is the first message, so that none takes memory of a GPU before there is a model that wants it.
Started by `workers`, by path: the pack's own name is whatever folder ComfyUI found it in. For the same reason messages
are of plain types: the two sides know one class by different names.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import shutil
import struct
import sys
import threading
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import IO, Any, NoReturn

_FORKS = sys.platform == "linux"
_LENGTH = struct.Struct(">Q")
_BEGIN = 60.0  # seconds that a forked child may take to be ready: a driver may as well hang as refuse


def send(stream: IO[bytes], message: Any) -> None:
    content = pickle.dumps(message)
    stream.write(_LENGTH.pack(len(content)) + content)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """The next message. Raises EOFError where the other side is gone."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    content = stream.read(length)
    if len(content) < length:
        raise EOFError
    return pickle.loads(content)


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    own = Path(__file__).resolve()
    sys.path[:] = [str(own.parents[4]), *(path for path in sys.path if Path(path or ".").resolve() != own.parent)]
    # torch then asks for GPUs without starting their driver, which no forked child could use.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # Before torch 2.9, importing inductor begins processes of its own, and a thread: none may be there at a fork.
    os.environ["TORCH_WARM_POOL"] = "0"
    from compile_cache.backends.inductor.parallel import job

    (folder,) = sys.argv[1:]
    one_at_a_time = threading.Lock()

    def answer(number: int, done: Future[Any]) -> None:
        error = done.exception()
        with one_at_a_time:
            send(answers, (number, *(done.result() if error is None else (f"{type(error).__name__}: {error}", 0.0))))

    if _FORKS:
        job.before_children()
    try:
        count, device = receive(sys.stdin.buffer)
        gc.freeze()  # what is imported: children then share its memory, and none goes through it again and again
        pool = _pool(job, (device, folder), count)
        threading.Thread(target=_end_with_a_child, args=(folder,), daemon=True).start()
        while True:
            number, *work = receive(sys.stdin.buffer)
            pool.submit(job.work, *work).add_done_callback(partial(answer, number))
    except (EOFError, BrokenProcessPool):  # nobody waits any more, or a child ended, which its jobs' answers tell
        pass
    _end(folder)


def _end_with_a_child(folder: str) -> None:
    """A pool that lost one does no more work, and tells so only to whoever has a job: others would wait for nothing."""
    while not connection.wait([child.sentinel for child in multiprocessing.active_children()], timeout=1.0):
        pass
    _end(folder)


def _end(folder: str) -> NoReturn:
    _end_children()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # the pool would wait for what its children do


def _end_children() -> None:
    children = multiprocessing.active_children()
    for child in children:
        child.kill()
    for child in children:
        child.join(1.0)  # none that a driver keeps is waited for any longer


def _pool(job: Any, arguments: tuple[str, str], count: int) -> ProcessPoolExecutor:
    """Children that are ready. Where a driver does not take to forked ones, each imports for itself.

    arguments: of `job.begin`, the device and the folder for what is temporary.
    """
    begin = (job.begin, arguments)
    if _FORKS:
        pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork"), *begin)
        ready = pool.submit(job.ready)
        wait([ready], timeout=_BEGIN)
        if ready.done() and ready.exception() is None:
            return pool
        _end_children()
        pool.shutdown(wait=False)
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), *begin)
    for _ in range(count):  # a pool starts a spawned child for each job that finds none idle
        pool.submit(job.ready)
    return pool


if __name__ == "__main__":
    main()
