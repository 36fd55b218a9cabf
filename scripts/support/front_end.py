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
from collections.abc import Iterator, Mapping, Sequence
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
# Boxes of all nodes with their titles, in the graph's units, as the renderer in use draws them: name, left, top, right,
# bottom.
BOXES = """() => {
    const {scale, offset} = app.canvas.ds, canvas = app.canvas.canvas.getBoundingClientRect();
    const drawn = new Map([...document.querySelectorAll('[data-node-id]')].map(e => [e.dataset.nodeId, e]));
    return app.graph.nodes.map(node => {
        const element = drawn.get(String(node.id)), [x, y] = node.pos, [width, height] = node.size;
        if (!element) return [node.title, x, y - 30, x + width, y + height];
        const box = element.getBoundingClientRect();
        const at = (value, axis, origin) => (value - origin) / scale - offset[axis];
        return [node.title, at(box.left, 0, canvas.left), at(box.top, 1, canvas.top),
                at(box.right, 0, canvas.left), at(box.bottom, 1, canvas.top)];
    });
}"""
# What the text widget of each of our nodes shows, by the node's title.
TEXTS = """() => Object.fromEntries(app.graph.nodes.map(n => [n.title,
    n.widgets?.find(w => w.name === '$$node-text-preview')?.element?.innerText])
    .filter(([, text]) => text !== undefined))"""
# Texts that are cut off although nothing can be scrolled.
CUT = """() => [...document.querySelectorAll('.resolute-text, .resolute-panel *, .resolute-badge')].filter(e =>
    e.innerText?.trim() && e.checkVisibility() && !['auto', 'scroll'].includes(getComputedStyle(e).overflowX)
    && (e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 2) && e.clientWidth > 0
    && getComputedStyle(e).display !== 'inline').map(e => e.className + ': ' + e.innerText.slice(0, 80))"""
SET_WIDGETS = """values => { for (const node of app.graph.nodes) for (const widget of node.widgets ?? []) {
    const value = values[`${node.comfyClass}.${widget.name}`];
    if (value === undefined) continue;
    widget.value = value;
    widget.callback?.(value);
} }"""
WATCH = """() => {
    window.resoluteEnd = null;
    window.resoluteTexts = [];
    if (window.resoluteWatched) return;
    window.resoluteWatched = true;
    for (const name of ['execution_success', 'execution_error', 'execution_interrupted'])
        app.api.addEventListener(name, e => { window.resoluteEnd = {name, detail: e.detail}; });
    app.api.addEventListener('progress_text', e => window.resoluteTexts.push(e.detail.text));
}"""
PLACE = """classes => {
    app.graph.clear();
    const bottoms = [0, 0, 0];
    classes.forEach((name, index) => {
        const node = LiteGraph.createNode(name);
        const column = index % 3;
        app.graph.add(node);
        node.pos = [column * 560, bottoms[column] + 40];
        bottoms[column] += node.size[1] + 120;
    });
}"""
CONTRAST = """selector => {
    const rgb = text => text.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const element = document.querySelector(selector);
    let behind = element;
    while (behind && (rgb(getComputedStyle(behind).backgroundColor)[3] ?? 1) === 0) behind = behind.parentElement;
    const pair = [getComputedStyle(element).color, getComputedStyle(behind ?? document.body).backgroundColor];
    const [one, other] = pair.map(text => light(rgb(text))).sort((a, b) => b - a);
    return (one + 0.05) / (other + 0.05);
}"""
VIEWPORT = {"width": 1600, "height": 900}
USUAL = {"Comfy.VueNodes.Enabled": False, "Comfy.ColorPalette": "dark", "Comfy.Locale": "en"}
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
    if not has_playwright():
        return "The package playwright is not installed: pip install playwright."
    if executable() is None:
        return "No Chromium on PATH: install it, for example with apt-get install chromium."
    return None


def has_playwright() -> bool:
    return importlib.util.find_spec("playwright") is not None


def executable() -> str | None:
    """The Chromium to run, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


class FrontEnd:
    """A browser tab with the front end of the server at ``url``."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.url = page, url

    def start(self) -> None:
        """Load the page with an empty graph."""
        self.page.goto(self.url)
        self.page.wait_for_function(READY)
        self.page.wait_for_timeout(SETTLE_MS)
        self.page.keyboard.press("Escape")  # the first start opens the template browser
        self.page.evaluate("() => app.graph.clear()")

    def settings(self, values: Mapping[str, Any]) -> None:
        """Change settings of the front end; some take effect after ``start``."""
        script = "([name, value]) => app.extensionManager.setting.set(name, value)"
        for name, value in values.items():
            self.page.evaluate(script, [name, value])

    def widgets(self, values: Mapping[str, Any]) -> None:
        """Set widgets of all nodes of a class, by "Class.widget"."""
        self.page.evaluate(SET_WIDGETS, values)

    def watch(self) -> None:
        """Begin to wait for the end of a prompt, and to note the texts that nodes are sent."""
        self.page.evaluate(WATCH)

    def queue(self) -> None:
        """Queue the graph as the Run button does."""
        self.watch()
        self.page.evaluate("() => app.extensionManager.command.execute('Comfy.QueuePrompt')")

    def wait(self, seconds: float = 600.0) -> dict[str, Any]:
        """Wait for the end of the queued prompt: its last event, ``name`` and ``detail``."""
        self.page.wait_for_function("() => window.resoluteEnd", timeout=1000 * seconds)
        self.page.wait_for_timeout(SETTLE_MS / 2)
        end: dict[str, Any] = self.page.evaluate("() => window.resoluteEnd")
        return end

    def progress_texts(self) -> list[str]:
        """The texts that nodes were sent since ``queue``."""
        return list(self.page.evaluate("() => window.resoluteTexts"))

    def texts(self) -> dict[str, str]:
        """What our nodes show, by title."""
        return dict(self.page.evaluate(TEXTS))

    def overlaps(self) -> list[tuple[str, str]]:
        """Titles of each two nodes that lie over each other."""
        boxes = self.page.evaluate(BOXES)
        return [
            (one[0], other[0])
            for index, one in enumerate(boxes)
            for other in boxes[index + 1 :]
            if min(one[3], other[3]) - max(one[1], other[1]) > 1 and min(one[4], other[4]) - max(one[2], other[2]) > 1
        ]

    def cut_texts(self) -> list[str]:
        """Texts of ours that do not fit into their place."""
        return list(self.page.evaluate(CUT))

    def fit_view(self) -> None:
        self.page.evaluate("() => app.extensionManager.command.execute('Comfy.Canvas.FitView')")
        self.page.wait_for_timeout(SETTLE_MS)

    def add_by_search(self, words: str, title: str) -> None:
        """Add the node that the search dialog lists first for these words, once it lists one with this title."""
        count = len(self.titles())
        self.search(words, title)
        self.page.keyboard.press("Enter")
        self.page.wait_for_function("count => app.graph.nodes.length > count", arg=count)
        self.page.wait_for_timeout(SETTLE_MS / 3)
        self.page.mouse.click(900, 850)

    def search(self, words: str, title: str) -> None:
        """Type words into the search dialog, and wait until it lists a node with this title."""
        self.page.mouse.dblclick(900, 450)
        self.page.locator("[role=dialog] input").first.fill(words)
        listed = "title => document.querySelector('[role=dialog]')?.innerText.includes(title)"
        self.page.wait_for_function(listed, arg=title)
        self.page.wait_for_timeout(SETTLE_MS / 3)

    def place(self, classes: Sequence[str]) -> None:
        """An empty graph with one node of each class, in three columns."""
        self.page.evaluate(PLACE, list(classes))
        self.page.wait_for_timeout(SETTLE_MS)

    def load_prompt(self, prompt: Mapping[str, Any]) -> None:
        """Load a prompt in API form."""
        self.page.evaluate("prompt => app.loadApiJson(prompt, 'prompt')", prompt)
        self.page.wait_for_timeout(SETTLE_MS)

    def open_panel(self) -> None:
        """Open Resolute's panel with its badge."""
        self.page.locator(".resolute-badge").click()
        self.page.wait_for_selector(".resolute-panel")
        self.page.wait_for_timeout(SETTLE_MS / 2)

    def titles(self) -> list[str]:
        return list(self.page.evaluate("() => app.graph.nodes.map(n => n.title)"))

    def node_classes(self) -> list[str]:
        return list(self.page.evaluate("() => app.graph.nodes.map(n => n.comfyClass)"))

    def contrast(self, selector: str) -> float:
        """The contrast of a text with what is behind it, as WCAG defines it: 1 to 21."""
        return float(self.page.evaluate(CONTRAST, selector))

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
        self.settings(FOR_PICTURES)
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
        self.page.mouse.move(5, 880)
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
            permissions=["clipboard-read", "clipboard-write"],
            viewport=VIEWPORT,
            device_scale_factor=pixel_ratio,
        )
        context.set_default_timeout(60_000)
        try:
            yield FrontEnd(context.pages[0] if context.pages else context.new_page(), url)
        finally:
            context.close()
