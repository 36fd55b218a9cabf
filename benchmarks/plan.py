"""Every run on a GPU that the claims need, in order, as one command that ends in time and goes on where it stopped.

    python -m benchmarks.plan --folder FOLDER [--seconds 560] [--steps smoke tour ...] [--models FOLDER] [--list]

A step is a command of STEPS. It gets what is left of `--seconds`, and is ended a little later with all its processes. A
step is done when it ended by itself and left nothing out; done steps are not begun again, others go on with the cells
that they lack. FOLDER keeps results (NAME.json), logs (NAME.log) and what is done (`plan.json`), and has folders with
models and compiled regions. To go on with another machine, bring the files along.
`--list` prints the commands. Needs CUDA and the environment of `scripts/test` (without a network, set RESOLUTE_PYTHON
and COMFYUI_PATH; ComfyUI's front end is not needed). docs/claims.md has the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from scripts.places import ROOT

from . import rig
from .scenarios import STEPS, Step

_SPARE = 20.0  # seconds, for a step to write its results and to stop its servers
_LEAST = 45.0  # seconds: with less left, no step begins
_LEFT_OUT = ("left out", "s are over")  # what benchmarks say of cells that did not fit into their time


def failures(out: Path) -> Any:
    """The cells of a result that failed."""
    with contextlib.suppress(OSError, json.JSONDecodeError):
        return json.loads(out.read_text("utf-8")).get("failed")
    return None


def expected(step: Step, done: dict[str, Any]) -> float:
    """Seconds that a step takes, or what is left of it; at least so many are left when it begins."""
    spent = done.get(step.name, {}).get("seconds", 0.0)
    return max(step.seconds, 1.25 * spent) if step.whole else max(step.seconds - spent, _LEAST)


def make_room(models: Path, gb: int) -> bool:
    """Delete random models, the largest first, until so much of the disk is free. Their benchmarks make them anew.
    Returns whether it is.
    """
    found = [file for file in models.rglob("resolute-random-*") if file.suffix != ".json"]
    made = sorted(found, key=lambda file: file.stat().st_size)
    while made and shutil.disk_usage(models).free < gb * 1e9:
        file = made.pop()
        print(f"-- deleted {file.name}: the disk has no room", flush=True)
        file.with_suffix(".json").unlink(missing_ok=True)  # what tells a benchmark that the model is there
        file.unlink()
    return shutil.disk_usage(models).free >= gb * 1e9


def play(step: Step, arguments: list[str], log: Path, seconds: float) -> tuple[int, bool]:
    """Run a step, and end all its processes when the time is over: a server that stays would hold memory.

    Shows its lines and writes them into the log. Returns its exit code, and whether it says that it left something out.
    """
    left_out: list[str] = []
    settings = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        arguments, cwd=ROOT, env=settings, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    reader = threading.Thread(target=_show, args=(step, process.stdout, log, left_out), daemon=True)
    reader.start()
    try:
        code = process.wait(seconds + _SPARE)
    except subprocess.TimeoutExpired:
        code = 124
    finally:
        _end(process)
    reader.join(5)
    return code, bool(left_out)


def _show(step: Step, lines: IO[str], log: Path, left_out: list[str]) -> None:
    with log.open("a", encoding="utf-8") as file:
        for line in lines:
            file.write(line)
            file.flush()
            print(f"{step.name}: {line}", end="", flush=True)
            left_out += [line] if any(mark in line for mark in _LEFT_OUT) else []


def _end(process: subprocess.Popen[str]) -> None:
    if not hasattr(os, "killpg"):
        process.kill()
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        time.sleep(1.0)  # for its servers
    process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [step.name for step in STEPS]
    parser.add_argument("--folder", type=Path, help="for results, logs, models and compiled regions")
    parser.add_argument("--models", type=Path, help="a folder that keeps the models; tens of GB")
    parser.add_argument("--seconds", type=float, default=560, help="end after this time")
    parser.add_argument("--steps", nargs="*", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--list", action="store_true", help="print the commands, run nothing")
    options = parser.parse_args()
    chosen = [step for step in STEPS if step.name in options.steps]
    if options.list:
        print("\n".join(f"{step.text()}  # {step.settles}, {step.seconds} s" for step in chosen))
        return 0
    if options.folder is None:
        parser.error("--folder is needed")
    return run(
        chosen, options.folder.resolve(), (options.models or options.folder / "models").resolve(), options.seconds
    )


def foresee(steps: list[Step], done: dict[str, Any], seconds: float) -> None:
    """Say at once how long each step is expected to take here, and which cannot fit."""
    for step in steps:
        needed = expected(step, done)
        fits = "" if needed <= seconds else ": too long for this call" if step.whole else ": goes on in a later call"
        print(f"-- {step.name}: about {needed:.0f} s{fits}", flush=True)


def run(steps: list[Step], folder: Path, models: Path, seconds: float) -> int:
    """Run the steps that are not done. Returns 1 if one failed."""
    deadline = time.monotonic() + seconds
    for place in (folder, models / "diffusion_models", models / "checkpoints"):
        place.mkdir(parents=True, exist_ok=True)
    kept = folder / "plan.json"
    done: dict[str, Any] = json.loads(kept.read_text("utf-8")) if kept.is_file() else {}
    failed = []
    foresee([step for step in steps if not done.get(step.name, {}).get("done")], done, seconds - _SPARE)
    for step in steps:
        left = deadline - time.monotonic() - _SPARE
        before = done.get(step.name, {})
        if before.get("done"):
            continue
        needed = expected(step, done)
        if left < (needed if step.whole else _LEAST):
            print(f"-- {step.name}: not begun, {max(left, 0):.0f} s are left of about {needed:.0f}", flush=True)
            continue
        if not make_room(models, step.gb):
            print(f"-- {step.name}: not begun, its models need {step.gb} GB of disk in {models}", flush=True)
            continue
        print(f"-- {step.name}: {step.settles}; about {needed:.0f} s", flush=True)
        started = time.monotonic()
        code, has_left_out = play(step, step.arguments(folder, models, left), folder / f"{step.name}.log", left)
        took = time.monotonic() - started
        is_done = code == 0 and not has_left_out and not failures(folder / f"{step.name}.json")
        spent = before.get("seconds", 0.0)
        spent = max(took, spent) if step.whole else took + spent  # a whole step begins anew
        done[step.name] = {"done": is_done, "code": code, "seconds": round(spent, 1)}
        rig.save(kept, done)
        print(f"-- {step.name}: {'done' if is_done else f'not done, exit code {code}'} after {took:.0f} s", flush=True)
        failed += [step.name] if code not in (0, 124) else []
    missing = [step.name for step in steps if not done.get(step.name, {}).get("done")]
    print(f"-- not done: {' '.join(missing) or 'nothing'}; failed: {' '.join(failed) or 'nothing'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
