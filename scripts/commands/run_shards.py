"""Runs every shard of the tests, two at a time: ``python -m scripts.commands.run_shards [NAME ...]``.

A test waits for one process most of the time, so two runs of pytest share the machine's cores. The log of a shard is
printed as a whole when the shard ends; logs and JUnit files stay in output/tests/.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import as_command
from ..places import ROOT
from ..setup import command, environment
from . import shards

SIDE_BY_SIDE = 2
_POLL_SECONDS = 0.5
_NO_PYTHON_FOR_ONEFLOW = "They need a Python 3.10, and there is none on this machine."


@dataclass(frozen=True, slots=True)
class Running:
    """A shard whose pytest has not ended."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    began: float


def main() -> int:
    """Returns 1 if a test of any shard failed."""
    parser = argparse.ArgumentParser(prog="run_shards", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these of {', '.join(shards.names())}")
    return run(parser.parse_args().names or shards.names(), why_not, begin)


def run(
    names: Sequence[str],
    why_not: Callable[[str], str | None],
    begin: Callable[[str], Running],
    wait: float = _POLL_SECONDS,
) -> int:
    """Run shards in this order, SIDE_BY_SIDE at a time. why_not: why a shard cannot run on this machine."""
    waiting, running, failed = deque(names), list[Running](), 0
    try:
        while waiting or running:
            while waiting and len(running) < SIDE_BY_SIDE:
                name = waiting.popleft()
                if why := why_not(name):
                    print(f"NOT RUN: the tests of {name}. {why}", flush=True)
                    continue
                print(f"Running {name}.", flush=True)
                running.append(begin(name))
            time.sleep(wait)
            for ended in [each for each in running if each.process.poll() is not None]:
                running.remove(ended)
                failed |= report(ended)
    finally:
        for each in running:
            each.process.terminate()
    return failed


def report(ended: Running) -> int:
    """Print the log of a shard, which ends with pytest's summary; 1 if it failed."""
    code = ended.process.returncode
    outcome = "passed" if code == 0 else f"FAILED with exit code {code}; `scripts/test --shard {ended.name}` repeats it"
    print(f"{ended.name} {outcome}, {time.monotonic() - ended.began:.0f} s:", flush=True)
    sys.stdout.write(ended.log.read_text("utf-8", errors="replace"))
    sys.stdout.flush()
    return int(code != 0)


def begin(name: str) -> Running:
    """Start a shard as `scripts/test --shard` does; its output goes to a file."""
    shards.REPORTS.mkdir(parents=True, exist_ok=True)
    log = shards.REPORTS / f"{name}.log"
    arguments = [sys.executable, str(ROOT / "scripts" / "test"), "--shard", name]
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    return Running(name, process, log, time.monotonic())


def why_not(name: str) -> str | None:
    """Why a shard cannot run on this machine; None if it can. Gets a browser where one can be had."""
    if name == "oneflow" and environment.find_oneflow_python() is None:
        return _NO_PYTHON_FOR_ONEFLOW
    if name == "browser":
        setup = [str(command.prepare(say=lambda text: None).python), "-m", "scripts.browser.setup"]
        done = subprocess.run(setup, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            return (done.stdout or done.stderr).strip()
    return None


if __name__ == "__main__":
    sys.exit(as_command(main))
