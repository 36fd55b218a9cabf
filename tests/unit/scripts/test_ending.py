"""What ends `scripts/test` ends its pytests and their servers too, also a pytest that does not want to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from scripts.places import ROOT

from ...programs import wait_for

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals that end a process")

# `scripts/test` with a pytest of ours. Its server ends with the session, and writes what of it is still there.
COMMAND = """
import sys
from pathlib import Path
from tests.programs import command_module

folder, deaf, arguments = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
module = command_module("scripts/test")
module.command.prepare = module.why_not = lambda *given: None
module.shards.REPORTS = folder
module.run_shards.end.__defaults__ = (2.0 if deaf else 60.0,)

def pytest_of(options, passed):
    name = options.shard or "one"
    code = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(folder / "test_slow.py")]
    return code, {**module.os.environ, "NAME": name, "DEAF": deaf}

module.pytest_of = pytest_of
sys.argv = ["scripts/test", *arguments]
sys.exit(module.as_command(module.main))
"""
TEST = """
import os, pathlib, signal, subprocess, sys, time
import pytest

FOLDER = pathlib.Path(__file__).parent

@pytest.fixture(scope="session")
def server():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if os.environ["DEAF"] == "deaf":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    begun = FOLDER / f"{os.environ['NAME']}.begun"
    begun.with_suffix(".new").write_text(f"{os.getpid()} {process.pid}")
    begun.with_suffix(".new").rename(begun)
    yield
    process.terminate()
    process.wait()
    (FOLDER / f"{os.environ['NAME']}.ended").touch()

def test_slow(server):
    time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("arguments", "count", "number", "deaf"),
    [
        (["--quick"], 2, signal.SIGTERM, ""),
        (["--quick"], 2, signal.SIGINT, "deaf"),
        (["--", "-x"], 1, getattr(signal, "SIGHUP", 1), ""),
    ],
    ids=["shards", "shards that do not want to end", "one pytest"],
)
def test_nothing_is_left(tmp_path: Path, arguments: list[str], count: int, number: int, deaf: str) -> None:
    (tmp_path / "test_slow.py").write_text(textwrap.dedent(TEST))
    command = [sys.executable, "-c", COMMAND, str(tmp_path), deaf, *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True
    )
    wait_for(lambda: len(list(tmp_path.glob("*.begun"))) == count, 120)
    pids = [int(pid) for each in tmp_path.glob("*.begun") for pid in each.read_text().split()]
    assert len(pids) == 2 * count and all(map(is_running, pids))
    try:
        process.send_signal(number)
        process.communicate(timeout=120)
        wait_for(lambda: not any(map(is_running, pids)), 20)  # what was killed ends a moment later
    finally:
        for pid in filter(is_running, [process.pid, *pids]):
            os.kill(pid, signal.SIGKILL)
    assert process.returncode == 130
    assert len(list(tmp_path.glob("*.ended"))) == (0 if deaf else count), "a pytest ends its server by itself"
