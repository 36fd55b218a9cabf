"""Runs the shards of the tests, two at a time, each in a process of its own, and says how far they are.

A test waits for one process most of the time, so two runs of pytest share the machine's cores. The whole log of a shard
and its JUnit file stay in output/tests/; the end of the log, with every failure, is printed when the shard ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..places import ROOT
from . import shards
from .compatibility import OUTCOMES, count_outcomes

SIDE_BY_SIDE = 2
_POLL_SECONDS = 0.5
_SECONDS_BETWEEN_LINES = 30.0
_SECONDS_TO_STOP = 30.0
_LINES_OF_A_CRASH = 100
# `pytest -v` writes a line for each test, and after the last one what failed, was skipped or warned.
_TEST = re.compile(r"^tests/[^:\n]+\.py::.* \[ *\d+%\]$", re.MULTILINE)
_END = re.compile(r"^=+ (ERRORS|FAILURES|warnings summary|short test summary info|.* in [\d.]+s.*) =+$", re.MULTILINE)

Command = tuple[Sequence[str], Mapping[str, str]]  # its arguments and its environment variables


@dataclass(slots=True)
class Shard:
    """A shard whose pytest has begun."""

    name: str
    process: subprocess.Popen[bytes]
    began: float

    def log(self) -> str:
        """The output of pytest so far."""
        return _log(self.name).read_text("utf-8", errors="replace")


def run(
    commands: Mapping[str, Command],
    notes: Sequence[str] = (),
    failures: Sequence[str] = (),
    *,
    begin: Callable[[str, Command], Shard] | None = None,
    wait: float = _POLL_SECONDS,
) -> int:
    """Run shards by their commands, SIDE_BY_SIDE at a time; 1 if anything failed. Ends with the sum of the outcomes.

    notes: lines to repeat at the end. failures: what failed before.
    """
    waiting, running, begun = deque(commands), list[Shard](), list[Shard]()
    outcomes, failed, said = Counter(failed=len(failures)), [*failures], time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < SIDE_BY_SIDE:
                name = waiting.popleft()
                _say(f"Running {name}.")
                running.append((begin or _begin)(name, commands[name]))
                begun.append(running[-1])
            time.sleep(wait)
            ended = [each for each in running if each.process.poll() is not None]
            for each in ended:
                running.remove(each)
                failed += _end(each, outcomes)
            if ended or time.monotonic() - said > _SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                _say(f"{sum(len(_TEST.findall(shard.log())) for shard in begun):,} tests so far.")
    finally:
        end(each.process for each in running)
    for line in [*(f"FAILED: {each}" for each in failed), *notes]:
        _say(line)
    _say(_sum(outcomes))
    return int(outcomes["failed"] > 0)


def _begin(name: str, command: Command) -> Shard:
    shards.REPORTS.mkdir(parents=True, exist_ok=True)
    arguments, variables = command
    with _log(name).open("wb") as output:
        process = start(arguments, variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    return Shard(name, process, time.monotonic())


def _end(shard: Shard, outcomes: Counter[str]) -> list[str]:
    """Add the outcomes of a shard that ended, print the end of its log, and return what failed.

    A pytest that crashed is one failure: it wrote no report, or ended with an error that no test in it explains.
    """
    code = shard.process.returncode
    try:
        found = count_outcomes(shards.report_of(shard.name))
    except (FileNotFoundError, xml.ParseError):
        found = {}
    failed = list(found.get("failures", ()))
    if not found or (code != 0 and not failed):
        failed.append(f"pytest of {shard.name} crashed with exit code {code}")
    counted = Counter({**{each: found.get(each, 0) for each in OUTCOMES}, "failed": len(failed)})
    outcomes.update(counted)
    again = f" `scripts/test --shard {shard.name}` repeats it." if failed else ""
    _say(f"{shard.name}: {_sum(counted)} in {time.monotonic() - shard.began:.0f} s.{again}")
    log = shard.log()
    end = _END.search(log)
    _say(log[end.start() :] if end else "\n".join(log.splitlines()[-_LINES_OF_A_CRASH:]))
    return failed


def be_interrupted() -> None:
    """From now on what ends this process raises KeyboardInterrupt in it, as Ctrl-C does, so that it can clean up."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):  # Windows has no SIGHUP
            signal.signal(getattr(signal, name), signal.default_int_handler)


def start(arguments: Sequence[str], variables: Mapping[str, str], **streams: Any) -> subprocess.Popen[bytes]:
    """Start a pytest in a session of its own: its servers are in it too, and Ctrl-C reaches it only by `end`."""
    return subprocess.Popen(arguments, cwd=ROOT, env=variables, start_new_session=True, **streams)


def end(processes: Iterable[subprocess.Popen[bytes]], seconds: float = _SECONDS_TO_STOP) -> None:
    """Interrupt these pytests, which then end their servers. After some seconds, kill what is left of them."""
    processes, until = list(processes), time.monotonic() + seconds
    try:
        for process in processes:
            if sys.platform == "win32":
                process.terminate()
            else:
                process.send_signal(signal.SIGINT)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(until - time.monotonic(), 0.0))
    finally:  # also if it is interrupted again
        for process in processes:
            if sys.platform == "win32":
                process.kill()
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _log(name: str) -> Path:
    return shards.REPORTS / f"{name}.log"


def _sum(outcomes: Counter[str]) -> str:
    return ", ".join(f"{outcomes[each]} {each}" for each in OUTCOMES)


def _say(text: str) -> None:
    print(text, flush=True)
