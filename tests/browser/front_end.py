"""ComfyUI's front end in a headless Chromium, for tests.

`chromium` says what it needs.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import chromium
from . import front_end_scripts as js

VIEWPORT = {"width": 1600, "height": 900}
VUE = "Comfy.VueNodes.Enabled"  # Nodes 2.0
ENGLISH = "en"
USUAL = {
    VUE: False,
    "Comfy.ColorPalette": "dark",
    "Comfy.Locale": ENGLISH,
    "Comfy.TutorialCompleted": True,  # else the first start opens the template browser
    "Comfy.Minimap.Visible": False,
    "Comfy.Graph.CanvasInfo": False,
}
EMPTY = {"nodes": [], "links": [], "groups": [], "last_node_id": 0, "last_link_id": 0, "version": 0.4}
# Places on the canvas that no control covers, for a double-click and for a new node: apart, because a click and a
# double-click at one place are neither, and far from the edges, where a new node would scroll the view.
FREE, NEW_NODE = (1250, 640), (960, 600)
# ComfyUI's page takes 8 s of a processor to load, and a busy machine may give it a twentieth of one.
LOADING_MS = 300_000
SEARCH = "input[role=combobox]"
DIALOG = "[role=dialog]"
TEMPLATES = re.compile(r"/templates/index(\.[a-zA-Z-]+)?\.json$")  # ComfyUI's own, in the language of the settings


class FrontEnd:
    """A browser tab with the front end of the server at ``url``.

    The page is loaded once, by ``load_page``; ``start`` empties it. No method waits for a fixed time.
    """

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.url = page, url
        page.add_init_script(js.NO_MOTION)
        self._language = ""

    def load_page(self, language: str = ENGLISH, all_templates: bool = False) -> None:
        """Load the page anew in a language, and wait until its extensions are ready.

        all_templates: the template browser lists all of ComfyUI's own templates, which takes half a minute to draw
        without a GPU; by default one of each category.
        """
        if language != self._language:  # on the server: the page would load itself anew at a time of its own
            self.page.request.post(f"{self.url}/api/settings/Comfy.Locale", data=json.dumps(language))
        self._language = "" if all_templates else language
        self.page.unroute_all()
        if not all_templates:
            self.page.route(TEMPLATES, _few_templates)
        self.page.goto(self.url, timeout=LOADING_MS)
        self.page.wait_for_function(js.READY, timeout=LOADING_MS)
        self.page.evaluate(js.STABLE)

    def start(self) -> None:
        """An empty graph in the only tab, no dialog, no panel, and the usual size and settings."""
        if self._language != ENGLISH:  # or never loaded, or with all templates
            self.load_page()
        self.page.set_viewport_size(VIEWPORT)
        self.settings(USUAL)
        self.close_dialogs()
        if self.page.locator(".resolute-panel").count():
            self.page.evaluate(js.COMMAND, "Workspace.ToggleSidebarTab.resolute")
            self.page.wait_for_selector(".resolute-panel", state="detached")
        self.load(EMPTY, "empty")
        self.page.evaluate(js.CLOSE_OTHERS)

    def close_dialogs(self) -> None:
        while self.page.locator(DIALOG).count():
            count = self.page.locator(DIALOG).count()
            self.page.keyboard.press("Escape")
            self.page.wait_for_function(f"count => document.querySelectorAll('{DIALOG}').length < count", arg=count)

    def settings(self, values: Mapping[str, Any]) -> None:
        """Change settings of the front end; some take effect after ``load_page``."""
        for name, value in values.items():
            self.page.evaluate(js.SETTING, [name, value])

    def renderer(self, vue: bool) -> None:
        """Draw nodes with Nodes 2.0, or with the classic renderer."""
        self.settings({VUE: vue})
        self.page.wait_for_function(js.DRAWN, arg=vue)
        self.stable()

    def stable(self) -> None:
        """Wait until nothing on the screen moves."""
        self.page.evaluate(js.STABLE)

    def widgets(self, values: Mapping[str, Any]) -> None:
        """Set widgets of all nodes of a class, by "Class.widget"."""
        self.page.evaluate(js.SET_WIDGETS, values)

    def watch(self) -> None:
        """Begin to wait for the end of a prompt, and to note the texts that nodes are sent."""
        self.page.evaluate(js.WATCH)

    def queue(self) -> None:
        """Press the Run button."""
        self.watch()
        self.page.get_by_test_id("queue-button").click()

    def cancel(self) -> None:
        """Press the button that cancels the running prompt."""
        self.page.get_by_role("button", name="Cancel current run").click()

    def wait(self, seconds: float = 300.0) -> dict[str, Any]:
        """Wait for the end of the queued prompt: its last event, ``name`` and ``detail``."""
        self.page.wait_for_function("() => window.resoluteEnd", timeout=1000 * seconds)
        self.stable()
        end: dict[str, Any] = self.page.evaluate("() => window.resoluteEnd")
        return end

    def texts(self) -> dict[str, str]:
        """The texts that our nodes show, by title."""
        return dict(self.page.evaluate(js.TEXTS))

    def pictures(self) -> dict[str, int]:
        """The number of pictures on each node, by title."""
        return dict(self.page.evaluate(js.PICTURES))

    def wait_for_pictures(self) -> None:
        """Wait until each node in view shows its picture."""
        self.page.wait_for_function(js.PICTURES_SHOWN)
        self.stable()

    def overlaps(self) -> list[tuple[str, str]]:
        """Titles of each two nodes that lie over each other."""
        boxes = self.page.evaluate(js.BOXES)
        return [
            (one[0], other[0])
            for index, one in enumerate(boxes)
            for other in boxes[index + 1 :]
            if min(one[3], other[3]) - max(one[1], other[1]) > 1 and min(one[4], other[4]) - max(one[2], other[2]) > 1
        ]

    def outside_groups(self) -> list[str]:
        return list(self.page.evaluate(js.OUTSIDE_GROUPS))

    def cut_texts(self) -> list[str]:
        """Texts of ours that do not fit into their place."""
        return list(self.page.evaluate(js.CUT))

    def fit_view(self) -> None:
        self.page.evaluate(js.COMMAND, "Comfy.Canvas.FitView")
        self.stable()

    def add_by_search(self, words: str, title: str) -> None:
        """Add the node that the search dialog lists first for these words, which must have this title."""
        self.search(words, title)
        self.page.wait_for_function(js.FIRST, arg=title)
        count = len(self.titles())
        self.page.keyboard.press("Enter")
        self.page.wait_for_function("count => app.graph.nodes.length > count", arg=count)
        self.page.wait_for_selector(SEARCH, state="detached")
        self.page.mouse.move(*NEW_NODE)
        self.stable()
        self.page.mouse.click(*NEW_NODE)  # in Nodes 2.0 the new node hangs on the mouse until a click
        self.stable()

    def search(self, words: str, title: str) -> None:
        """Type words into the search dialog, and wait until it lists a node with this title."""
        chromium.double_click(self.page, *FREE)
        self.page.locator(SEARCH).fill(words)
        self.page.wait_for_function(js.LISTED, arg=title)

    def connect(self, source: str, output: str, target: str, name: str) -> None:
        """Drag a link from an output of the node with the title ``source`` to an input of another."""
        ends = self.page.evaluate(js.ENDS, [source, output, target, name])
        start = self.page.evaluate(js.SOCKET, [ends[0], True, ends[1]])
        end = self.page.evaluate(js.SOCKET, [ends[2], False, ends[3]])
        self.page.mouse.move(*start)
        self.page.mouse.down()
        self.page.mouse.move((start[0] + end[0]) / 2, (start[1] + end[1]) / 2, steps=4)
        self.page.mouse.move(*end, steps=4)
        self.page.mouse.up()
        self.page.wait_for_function(js.LINKED, arg=ends)

    def open_menu(self, title: str) -> None:
        """Open the menu of a node with a click of the right button on its title."""
        self.page.mouse.click(*self.page.evaluate(js.TITLE, title), button="right")

    def link(self, source: str, output: str, target: str, name: str) -> None:
        """Make the same link without the mouse."""
        self.page.evaluate(js.LINK, self.page.evaluate(js.ENDS, [source, output, target, name]))

    def place(self, classes: Sequence[str]) -> None:
        """A graph of one node of each class, beside an open panel and below the top bar."""
        self.page.evaluate(js.PLACE, list(classes))
        self.stable()

    def load_prompt(self, prompt: Mapping[str, Any]) -> None:
        """Load a prompt in API form."""
        self.page.evaluate("prompt => app.loadApiJson(prompt, 'prompt')", prompt)
        self.page.wait_for_function("count => app.graph.nodes.length === count", arg=len(prompt))
        self.stable()

    def open_panel(self) -> None:
        """Open Resolute's panel with its badge."""
        self.page.locator(".resolute-badge").click()
        self.page.wait_for_selector(".resolute-panel")
        self.stable()

    def titles(self) -> list[str]:
        return list(self.page.evaluate("() => app.graph.nodes.map(n => n.title)"))

    def contrast(self, selector: str) -> float:
        """The contrast of a text with what is behind it, as WCAG defines it: 1 to 21."""
        return float(self.page.evaluate(js.CONTRAST, selector))

    def browse_templates(self, pack: str = "") -> None:
        """Open the template browser, on the page of a pack if one is named."""
        self.page.evaluate(js.COMMAND, "Comfy.BrowseTemplates")
        self.page.wait_for_selector(f"{DIALOG} input")
        if pack:
            self.page.locator(f"{DIALOG} nav, {DIALOG} aside").get_by_text(pack, exact=True).click()

    def open_template(self, name: str, pack: str, nodes: int) -> None:
        """Open a template of the pack with a click in the template browser; its graph has ``nodes`` nodes."""
        self.browse_templates(pack)
        self.choose_template(name, nodes)

    def choose_template(self, name: str, nodes: int) -> None:
        """Open a template that the template browser shows.

        A click of the mouse may miss: cards move while their pictures load. So the card itself gets the event.
        """
        self.page.get_by_test_id(f"template-workflow-{name}").dispatch_event("click")
        self.wait_until_opened(name, nodes)

    def drop(self, path: Path, nodes: int) -> None:
        """Drop a workflow file on the canvas."""
        self.page.evaluate(js.DROP, [path.read_text("utf-8"), path.name])
        self.wait_until_opened(path.stem, nodes)

    def load(self, workflow: Mapping[str, Any], name: str) -> None:
        """Load a workflow from memory."""
        script = "([graph, name]) => app.loadGraphData(graph, true, true, name)"
        self.page.evaluate(script, [workflow, name])
        self.stable()

    def prompt(self) -> dict[str, Any]:
        """The API prompt that Run would queue."""
        text = self.page.evaluate("async () => JSON.stringify((await app.graphToPrompt()).output)")
        prompt: dict[str, Any] = json.loads(text)
        return prompt

    def complaints(self) -> list[str]:
        """Texts of open dialogs and of the error overlay."""
        return list(self.page.evaluate(js.COMPLAINTS))

    def unknown_types(self) -> list[str]:
        """Node types in the graph that no pack provides."""
        return list(self.page.evaluate(js.UNKNOWN_TYPES))

    def wait_until_opened(self, name: str, nodes: int) -> None:
        """Wait until a workflow whose path has this name, with so many nodes, is open and its dialog is gone."""
        self.page.wait_for_function(js.OPENED, arg=[name, nodes])
        self.page.wait_for_selector(DIALOG, state="detached")
        self.page.mouse.move(5, 880)
        self.stable()


def _few_templates(route: Any) -> None:
    """Leave one of ComfyUI's own templates in each category."""
    response = route.fetch()
    categories = response.json()
    route.fulfill(response=response, json=[{**each, "templates": each["templates"][:1]} for each in categories])


@contextlib.contextmanager
def front_end(url: str) -> Iterator[FrontEnd]:
    """A fresh browser profile with one tab; closed at the end."""
    with chromium.tab(VIEWPORT) as page:
        yield FrontEnd(page, url)
