"""A process that compiles traces for another one: `python worker.py DEVICE`, jobs on stdin, artifacts on stdout.

Started by `workers`, by path: the pack's own name is whatever folder ComfyUI found it in. For the same reason messages
are of plain types: the two sides know one class by different names.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import sys
import time
from pathlib import Path
from typing import IO, Any

_LENGTH = struct.Struct(">Q")


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
    sys.path[:] = [str(own.parents[3]), *(path for path in sys.path if Path(path or ".").resolve() != own.parent)]
    from compile_cache.backends.inductor.job import Job, Settings, prepare, rehearse, run

    with contextlib.suppress(Exception):  # what is wrong, a job will tell
        rehearse(sys.argv[1])
    with contextlib.suppress(EOFError):
        while True:
            message = receive(sys.stdin.buffer)
            if "settings" in message:
                prepare(Settings(**message["settings"]))
                continue
            started = time.perf_counter()
            try:
                send(answers, (vars(run(Job(**message["job"]))), time.perf_counter() - started))
            except Exception as error:  # noqa: BLE001 (told to whoever waits, who compiles it himself)
                send(answers, (f"{type(error).__name__}: {error}", 0.0))


if __name__ == "__main__":
    main()
