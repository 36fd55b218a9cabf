"""ComfyUI's front end in a headless Chromium, for tests and for workflow images.

Needs the Python package playwright and a Chromium on PATH; does not use playwright's own browsers.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import shutil
import tempfile
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# The front end reports problems of a graph a moment after loading it.
SETTLE_MS = 1500
READY = "() => Boolean(window.app?.extensionManager && window.app.canvas && window.app.graph)"
OPENED = """([name, count]) => Boolean(
    window.app?.extensionManager?.workflow?.activeWorkflow?.path?.includes(name)
    && window.app.graph.nodes.length === count)"""
DROP = """async ([text, name]) => {
    const data = new DataTransfer();
    data.items.add(new File([text], name, {type: 'application/json'}));
    const target = document.querySelector('canvas#graph-canvas');
    target.dispatchEvent(new DragEvent('drop', {
        dataTransfer: data, bubbles: true, cancelable: true}));
}"""
# Texts of all dialogs and of the overlay that reports missing nodes or models.
COMPLAINTS = """() => {
    const shown = '[role=dialog], [role=alertdialog], [data-testid=error-overlay]';
    return [...document.querySelectorAll(shown)].map(e => e.innerText.trim());
}"""
UNKNOWN_TYPES = """() => app.graph.nodes.map(n => n.type)
    .filter(type => !(type in LiteGraph.registered_node_types))"""
# Scrolls and zooms so that all groups and nodes with their titles are visible. Returns the size in pixels.
FRAME = """([scale, margin]) => {
    const boxes = app.graph.groups.map(g => [...g.pos, ...g.size]);
    for (const n of app.graph.nodes)
        boxes.push([n.pos[0], n.pos[1] - 30, n.size[0], n.size[1] + 30]);
    const left = Math.min(...boxes.map(b => b[0])), top = Math.min(...boxes.map(b => b[1]));
    const right = Math.max(...boxes.map(b => b[0] + b[2]));
    const bottom = Math.max(...boxes.map(b => b[1] + b[3]));
    app.canvas.ds.scale = scale;
    app.canvas.ds.offset = [margin / scale - left, margin / scale - top];
    app.canvas.setDirty(true, true);
    return [(right - left) * scale + 2 * margin, (bottom - top) * scale + 2 * margin];
}"""
FOR_PICTURES = {
    "Comfy.Minimap.Visible": False,
    "Comfy.Graph.CanvasInfo": False,
    "LiteGraph.Canvas.MinFontSizeForLOD": 0,
}


def missing_requirement() -> str | None:
    """A sentence that names the missing requirement; None if a browser can be started."""
    if importlib.util.find_spec("playwright") is None:
        return "The package playwright is not installed: pip install playwright."
    if executable() is None:
        return "No Chromium on PATH: install it, for example with apt-get install chromium."
    return None


def executable() -> str | None:
    """The Chromium to run, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


class FrontEnd:
    """A browser tab with the front end of the server at ``url``."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.url = page, url

    def open_template(self, name: str, source: str, nodes: int) -> None:
        """Open a template of the pack ``source``, as the template browser does.

        Returns when the graph has ``nodes`` nodes and complaints would be visible.
        """
        query = urllib.parse.urlencode({"template": name, "source": source})
        self.page.goto(f"{self.url}/?{query}")
        self._wait_until_opened(name, nodes)

    def drop(self, path: Path, nodes: int) -> None:
        """Drop a workflow file on the canvas of an empty front end."""
        self.page.goto(self.url)
        self.page.wait_for_function(READY)
        self.page.wait_for_timeout(SETTLE_MS)
        self.page.keyboard.press("Escape")  # the first start opens the template browser
        self.page.evaluate(DROP, [path.read_text("utf-8"), path.name])
        self._wait_until_opened(path.stem, nodes)

    def load(self, workflow: Mapping[str, Any], name: str) -> None:
        """Load a workflow from memory."""
        script = "([graph, name]) => app.loadGraphData(graph, true, true, name)"
        self.page.evaluate(script, [workflow, name])
        self.page.wait_for_timeout(SETTLE_MS)

    def prompt(self) -> dict[str, Any]:
        """The API prompt that Run would queue."""
        text = self.page.evaluate("async () => JSON.stringify((await app.graphToPrompt()).output)")
        prompt: dict[str, Any] = json.loads(text)
        return prompt

    def complaints(self) -> list[str]:
        """Texts of open dialogs and of the error overlay."""
        return list(self.page.evaluate(COMPLAINTS))

    def unknown_types(self) -> list[str]:
        """Node types in the graph that no pack provides."""
        return list(self.page.evaluate(UNKNOWN_TYPES))

    def picture(self, scale: float, margin: int = 24) -> bytes:
        """PNG of the whole graph without the front end's controls.

        scale: canvas zoom; 1 is a node's natural size.
        """
        for name, value in FOR_PICTURES.items():
            script = "([name, value]) => app.extensionManager.setting.set(name, value)"
            self.page.evaluate(script, [name, value])
        toggle = "() => app.extensionManager.command.execute('Workspace.ToggleFocusMode')"
        self.page.evaluate(toggle)
        width, height = (round(side) for side in self.page.evaluate(FRAME, [scale, margin]))
        # Larger than the image, because controls float at the right and bottom edges.
        self.page.set_viewport_size({"width": width + 420, "height": height + 120})
        self.page.wait_for_timeout(SETTLE_MS)
        self.page.evaluate(FRAME, [scale, margin])
        self.page.wait_for_timeout(SETTLE_MS)
        clip = {"x": 0, "y": 0, "width": width, "height": height}
        data: bytes = self.page.screenshot(clip=clip)
        self.page.evaluate(toggle)
        return data

    def _wait_until_opened(self, name: str, nodes: int) -> None:
        self.page.wait_for_function(OPENED, arg=[name, nodes])
        self.page.wait_for_timeout(SETTLE_MS)


@contextlib.contextmanager
def front_end(url: str, pixel_ratio: float = 1.0) -> Iterator[FrontEnd]:
    """Open a fresh browser profile with one tab; close it at the end."""
    # Import by name, so that type checks pass without the package.
    sync_playwright = importlib.import_module("playwright.sync_api").sync_playwright
    # Chromium may still write to its profile while the folder is being removed.
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        sync_playwright() as playwright,
    ):
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=executable(),
            headless=True,
            args=list(FLAGS),
            viewport={"width": 1600, "height": 900},
            device_scale_factor=pixel_ratio,
        )
        context.set_default_timeout(60_000)
        try:
            yield FrontEnd(context.pages[0] if context.pages else context.new_page(), url)
        finally:
            context.close()
