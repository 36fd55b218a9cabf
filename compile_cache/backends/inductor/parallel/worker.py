"""A program that compiles traces in child processes: `python worker.py FOLDER`, jobs on stdin, artifacts on stdout.

The program itself imports torch and compiles nothing. Its children compile; on Linux they are forked and so start with
everything imported. The first message gives their number and device: no child takes GPU memory before there is a job.
`WorkerPool` starts the program by path, because the pack's package name is that of its folder in custom_nodes. For the
same reason messages have plain types only: the two sides import the same class under different module names.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import pickle
import shutil
import struct
import sys
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import IO, Any, NoReturn

_CAN_FORK = sys.platform == "linux"
_LENGTH = struct.Struct(">Q")
_READY_SECONDS = 60.0  # that a forked child may take to be ready: a driver without support for forks may hang
_WAITING_SECONDS = 5.0  # that all children may be without memory on the device


def send(stream: IO[bytes], message: Any) -> None:
    content = pickle.dumps(message)
    stream.write(_LENGTH.pack(len(content)) + content)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """The next message. Raises EOFError if the other side ended."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    content = stream.read(length)
    if len(content) < length:
        raise EOFError
    return pickle.loads(content)


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not write between our messages
    own = Path(__file__).resolve()
    sys.path[:] = [str(own.parents[4]), *(path for path in sys.path if Path(path or ".").resolve() != own.parent)]
    # With it torch looks for GPUs without initialising CUDA, which forked children could not use then.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # Before torch 2.9, importing inductor starts a thread and processes of its own, and a fork needs a single thread.
    os.environ["TORCH_WARM_POOL"] = "0"
    from compile_cache.backends.inductor.parallel import job

    (folder,) = sys.argv[1:]
    one_at_a_time = threading.Lock()

    def reply(number: int, done: Future[Any]) -> None:
        error = done.exception()
        with one_at_a_time:
            send(replies, (number, *(done.result() if error is None else (f"{type(error).__name__}: {error}", 0.0))))

    if _CAN_FORK:
        job.before_fork()
    try:
        count, device = receive(sys.stdin.buffer)
        gc.freeze()  # the collector skips imported objects, so forked children keep sharing their memory
        pool = _pool(job, (device, folder), count)
        if pool is None:
            _end(folder)
        threading.Thread(target=_end_with_a_child, args=(folder,), daemon=True).start()
        while True:
            number, *work = receive(sys.stdin.buffer)
            pool.submit(job.work, *work).add_done_callback(partial(reply, number))
    except (EOFError, BrokenProcessPool):  # the main process ended, or a child did: its job's reply is that error
        pass
    _end(folder)


def _end_with_a_child(folder: str) -> None:
    """A pool that lost a worker is broken; only pending jobs see the error, so the process exits."""
    while not connection.wait([child.sentinel for child in multiprocessing.active_children()], timeout=1.0):
        pass
    _end(folder)


def _end(folder: str) -> NoReturn:
    _end_children()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # a normal exit would wait for the pool's jobs


def _end_children() -> None:
    children = multiprocessing.active_children()
    for child in children:
        child.kill()
    for child in children:
        child.join(1.0)  # a driver can keep a killed child alive, so do not wait forever


def _pool(job: Any, arguments: tuple[str, str], count: int) -> ProcessPoolExecutor | None:
    """A pool of `count` children: forked if the device's driver supports that, else spawned. None if no forked child
    finds memory on the device: spawned ones would find none either. If some do, they get all jobs.

    arguments: of `job.begin`: the device, and the folder for temporary files.
    """
    if _CAN_FORK:
        pool, waiting = _started("fork", job, arguments, count)
        ready = pool.submit(job.ready)
        has_memory = _wait_for(ready, waiting, count, _READY_SECONDS)
        if has_memory and ready.done() and ready.exception() is None:
            return pool
        _end_children()
        pool.shutdown(wait=False)
        if not has_memory:
            return None
    pool, waiting = _started("spawn", job, arguments, count)
    for _ in range(count):  # the pool starts a spawned child only for a job that finds none idle
        pool.submit(job.ready)
    threading.Thread(target=_end_without_memory, args=(waiting, count, arguments[1]), daemon=True).start()
    return pool


def _end_without_memory(waiting: Any, count: int, folder: str) -> None:
    """End when all children stay without memory on the device, so that the main process waits for none of them."""
    if not _wait_for(Future(), waiting, count, math.inf):
        _end(folder)


def _started(method: str, job: Any, arguments: tuple[str, str], count: int) -> tuple[ProcessPoolExecutor, Any]:
    """A pool, and the counter of its children that wait for memory."""
    context = multiprocessing.get_context(method)
    waiting = context.Value("i", 0)
    return ProcessPoolExecutor(count, context, job.begin, (*arguments, waiting)), waiting


def _wait_for(ready: Future[None], waiting: Any, count: int, seconds: float) -> bool:
    """Wait until a child is ready or fails, at most so many seconds. Returns False if all stay without memory."""
    ends = time.monotonic() + seconds
    found = time.monotonic()  # when a child last had memory, or had not asked for it
    while not wait([ready], timeout=0.1).done and time.monotonic() < ends:
        if waiting.value < count:
            found = time.monotonic()
        elif time.monotonic() - found > _WAITING_SECONDS:
            return False
    return True


if __name__ == "__main__":
    main()
