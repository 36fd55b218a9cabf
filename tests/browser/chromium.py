"""A headless Chromium under playwright.

Needs the Python package playwright and a Chromium on PATH; does not use playwright's own browsers.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

from scripts.setup.browser import executable, has_playwright

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
TIMEOUT_MS = 60_000


def missing_requirement() -> str | None:
    """A sentence that names the missing requirement; None if a browser can be started."""
    if not has_playwright():
        return "The package playwright is not installed: pip install playwright."
    if executable() is None:
        return "No Chromium on PATH: install it, for example with apt-get install chromium."
    return None


@contextlib.contextmanager
def tab(viewport: Mapping[str, int]) -> Iterator[Any]:
    """The page of playwright in a fresh profile; the browser ends with the context."""
    # Import by name, so that type checks pass without the package.
    sync_playwright = importlib.import_module("playwright.sync_api").sync_playwright
    # Chromium may still write to its profile while the folder is being removed.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=executable(),
            headless=True,
            args=list(FLAGS),
            permissions=["clipboard-read", "clipboard-write"],
            viewport=dict(viewport),
        )
        context.set_default_timeout(TIMEOUT_MS)
        try:
            yield context.pages[0] if context.pages else context.new_page()
        finally:
            context.close()


def double_click(page: Any, x: float, y: float) -> None:
    """Double-click with events that carry times 20 ms apart.

    On a busy machine, more than the 300 ms that ComfyUI allows pass between two events of playwright's own.
    """
    page.mouse.move(x, y)
    devtools, now = page.context.new_cdp_session(page), time.time()
    for number, kind in enumerate(("mousePressed", "mouseReleased") * 2):
        event = {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1 + number // 2}
        devtools.send("Input.dispatchMouseEvent", {**event, "timestamp": now + 0.02 * number})
    devtools.detach()
