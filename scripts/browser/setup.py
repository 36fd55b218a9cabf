"""Gets what the browser tests need, where it can be had: ``python -m scripts.browser.setup``.

Installs playwright into this environment, and Chromium with apt-get if this is a Debian or Ubuntu and the user is root.
Prints why not and returns 1 where that fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from ..places import ROOT
from .chromium import executable, has_playwright

_REQUIREMENTS = ROOT / "requirements-browser.txt"
_SECONDS = 600.0


def main() -> int:
    """Returns 0 if the browser tests can run."""
    problem = _playwright() or _chromium()
    if problem:
        print(problem)
    return 1 if problem else 0


def _playwright() -> str | None:
    if has_playwright():
        return None
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    failed = _run([*command, "-r", str(_REQUIREMENTS)])
    return f"playwright could not be installed: {failed}" if failed else None


def _chromium() -> str | None:
    if executable() is not None:
        return None
    apt = shutil.which("apt-get")
    if apt is None or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "There is no Chromium on PATH, and it is installed by itself only by root on Debian or Ubuntu."
    for arguments in (["update", "-qq"], ["install", "-y", "-qq", "chromium"]):
        failed = _run([apt, *arguments], {"DEBIAN_FRONTEND": "noninteractive"})
        if failed:
            return f"`apt-get {' '.join(arguments)}` failed: {failed}"
    return None if executable() else "The package chromium was installed, but there is no Chromium on PATH."


def _run(command: list[str], environment: dict[str, str] | None = None) -> str | None:
    """The end of the output if the command failed, else None."""
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {_SECONDS:.0f} s"
    return None if done.returncode == 0 else (done.stderr or done.stdout).strip()[-300:].replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main())
