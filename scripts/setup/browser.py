"""Gets what the browser tests need, where it can be had: ``python -m scripts.setup.browser``.

Installs playwright into this environment, and Chromium with apt-get if this is a Debian or Ubuntu and the user is root.
Prints why not and returns 1 where that fails.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys

from ..places import ROOT

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_SECONDS = 600.0


def main() -> int:
    """Returns 0 if the browser tests can run."""
    problem = _playwright() or _chromium()
    if problem:
        print(problem)
    return 1 if problem else 0


def has_playwright() -> bool:
    return importlib.util.find_spec("playwright") is not None


def executable() -> str | None:
    """The Chromium to run, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def _playwright() -> str | None:
    if has_playwright():
        return None
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return _failed([*command, "-r", str(ROOT / "requirements/browser.txt")])


def _chromium() -> str | None:
    if executable() is not None:
        return None
    apt = shutil.which("apt-get")
    if apt is None or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "There is no Chromium on PATH, and it is installed by itself only by root on Debian or Ubuntu."
    for arguments in (["update", "-qq"], ["install", "-y", "-qq", "chromium"]):
        if failed := _failed([apt, *arguments]):
            return failed
    return None if executable() else "The package chromium was installed, but there is no Chromium on PATH."


def _failed(command: list[str]) -> str | None:
    """The error of a command, with the end of its output; None if it succeeded."""
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        subprocess.run(
            command, env=quiet, timeout=_SECONDS, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        return f"`{' '.join(command)}` failed: {error} {error.stderr or ''!s}"[:600].replace("\n", " ")
    return None


if __name__ == "__main__":
    sys.exit(main())
