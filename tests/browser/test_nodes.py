"""Each node: found by search, connected, run and read in both renderers, and named in three more languages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compile_cache.warm_up_plan import WARMED, Outcome, table
from scripts.workflows import CONTROL_NET, SD15

from ..comfy.rig import node
from . import front_end_scripts
from .front_end import FrontEnd
from .prompts import EAGER

pytestmark = pytest.mark.browser
# What is typed into the search, the title of the node that comes first, and where the test puts it.
WORDS = {
    "Load Checkpoint (Compiled)": ("Load Checkpoint (Compiled)", (0, 0)),
    "Compile Model": ("Compile Model", (400, 0)),
    "skip steps": ("DeepCache", (400, 380)),
    "Compile VAE Decode": ("Compile VAE Decode", (0, 340)),
    "Compile ControlNet": ("Compile ControlNet", (0, 600)),
    "aspect ratio": ("Resolution", (0, 860)),
    "Graph Cache Report": ("Graph Cache Report", (2200, 0)),
    "psnr": ("Compare Images (PSNR, Heat Map)", (2200, 480)),
    "Warm Up": ("Warm Up", (2200, 960)),
    "Free Graphs": ("Free Graphs", (1700, 860)),
}
STOCK_AT = {
    "Positive": (800, 0),
    "Negative": (800, 290),
    "Load ControlNet Model": (-400, 600),
    "Apply ControlNet": (1300, 0),
    "Empty Latent Image": (400, 860),
    "KSampler": (1300, 330),
    "VAE Decode": (1700, 0),
    "Save Image": (1700, 200),
    "Edges": (800, 600),
}
# From node and output to node and input: dragged in the classic renderer, dragged in Nodes 2.0, and the rest.
CLASSIC = (
    ("Load Checkpoint (Compiled)", "MODEL", "Compile Model", "model"),
    ("Compile Model", "MODEL", "DeepCache", "model"),
    ("DeepCache", "MODEL", "KSampler", "model"),
    ("Load Checkpoint (Compiled)", "VAE", "Compile VAE Decode", "vae"),
)
NODES_2 = (
    ("Compile VAE Decode", "VAE", "VAE Decode", "vae"),
    ("Compile ControlNet", "CONTROL_NET", "Apply ControlNet", "control_net"),
    ("VAE Decode", "IMAGE", "Graph Cache Report", "any"),
)
OTHERS = (
    ("Load Checkpoint (Compiled)", "CLIP", "Positive", "clip"),
    ("Load Checkpoint (Compiled)", "CLIP", "Negative", "clip"),
    ("Load ControlNet Model", "CONTROL_NET", "Compile ControlNet", "control_net"),
    ("Resolution", "width", "Empty Latent Image", "width"),
    ("Resolution", "height", "Empty Latent Image", "height"),
    ("VAE Decode", "IMAGE", "Compare Images (PSNR, Heat Map)", "image_a"),
    ("VAE Decode", "IMAGE", "Compare Images (PSNR, Heat Map)", "image_b"),
    ("VAE Decode", "IMAGE", "Free Graphs", "any"),
    ("Load Checkpoint (Compiled)", "MODEL", "Warm Up", "model"),
)
SMALL = {
    "ResoluteLoadCheckpoint.ckpt_name": SD15,
    **EAGER,
    "ResoluteResolution.preset": "custom",
    "ResoluteResolution.width": 72,
    "ResoluteResolution.height": 64,
    "ResoluteWarmUp.sizes": "72x64",
}
ALIASES = {
    "tensorrt": "Compile Model",
    "torch compile": "Compile Model",
    "faster": "Compile Model",
    "why slow": "Graph Cache Report",
    "benchmark": "Graph Cache Report",
    "measure": "Compare Images (PSNR, Heat Map)",
    **dict.fromkeys(("accelerate", "speed up", "turbo", "onediff", "加速", "更快", "高速化", "速い"), "Compile Model"),
}
MOVE = """places => { for (const node of app.graph.nodes) if (places[node.title]) node.pos = places[node.title];
    app.canvas.deselectAll(); app.canvas.setDirty(true, true); }"""  # the toolbox of a selected node covers the canvas
# The whole graph in the upper left part of the window.
SMALL_VIEW = "() => { app.canvas.ds.scale = 0.3; app.canvas.ds.offset = [600, 400]; app.canvas.setDirty(true, true); }"

TEXT_HEIGHT = """() => {
    const range = document.createRange(), element = document.querySelector('.resolute-table');
    range.selectNodeContents(element);
    return range.getBoundingClientRect().height / element.getBoundingClientRect().height * element.offsetHeight;
}"""
SHOW = """text => app.graph.nodes.forEach(node => {
    node.widgets.find(widget => widget.name === '$$node-text-preview').value = text; })"""


def stock_part() -> dict[str, Any]:
    """The nodes of ComfyUI in a workflow with a ControlNet, with nothing of Resolute."""

    def titled(title: str, made: dict[str, Any]) -> dict[str, Any]:
        return {**made, "_meta": {"title": title}}

    sampling = {"seed": 1, "steps": 2, "cfg": 5.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}
    links = {"positive": ["5", 0], "negative": ["5", 1], "latent_image": ["3", 0]}
    control = {"strength": 1.0, "start_percent": 0.0, "end_percent": 1.0}
    return {
        "1": titled("Positive", node("CLIPTextEncode", text="a lighthouse")),
        "2": titled("Negative", node("CLIPTextEncode", text="")),
        "3": titled("Empty Latent Image", node("EmptyLatentImage", width=64, height=64, batch_size=1)),
        "4": titled("Load ControlNet Model", node("ControlNetLoader", control_net_name=CONTROL_NET)),
        "5": titled(
            "Apply ControlNet",
            node("ControlNetApplyAdvanced", positive=["1", 0], negative=["2", 0], image=["9", 0], **control),
        ),
        "6": titled("KSampler", node("KSampler", **links, **sampling)),
        "7": titled("VAE Decode", node("VAEDecode", samples=["6", 0])),
        "8": titled("Save Image", node("SaveImage", images=["7", 0], filename_prefix="nodes")),
        "9": titled("Edges", node("EmptyImage", width=72, height=64, batch_size=1, color=0)),
    }


@pytest.mark.long
def test_each_node_is_found_connected_and_shows_its_result_in_both_renderers(page: FrontEnd, screenshots: Path) -> None:
    page.load_prompt(stock_part())
    page.page.evaluate(MOVE, STOCK_AT)
    page.page.evaluate(SMALL_VIEW)
    for words, (title, place) in WORDS.items():
        page.add_by_search(words, title)
        page.page.evaluate(MOVE, {title: place})
    page.widgets(SMALL)
    for link in OTHERS:
        page.link(*link)
    for vue, links in ((False, CLASSIC), (True, NODES_2)):
        page.renderer(vue)
        page.fit_view()
        for link in links:
            page.connect(*link)
    ours = {title for title, _ in WORDS.values()}
    for vue in (True, False):
        page.renderer(vue)
        page.widgets({"KSampler.seed": 2 + vue})
        page.queue()
        end = page.wait()
        page.fit_view()
        page.page.screenshot(path=screenshots / f"nodes{'-nodes2' if vue else ''}.png")
        assert end["name"] == "execution_success", end
        texts = page.texts()
        assert set(texts) == ours
        assert [title for title, text in texts.items() if not text] == []
        assert page.pictures()["Save Image"] == 1
        assert page.overlaps() == []
        assert page.cut_texts() == []


def test_a_search_for_what_people_want_finds_the_node(page: FrontEnd) -> None:
    for words, title in ALIASES.items():
        page.search(words, title)
        page.close_dialogs()
    page.search("compile", "Compile Model")
    page.page.wait_for_function(front_end_scripts.FIRST, arg="Compile Model")
    page.close_dialogs()
    page.search("compare images", "Compare Images (PSNR, Heat Map)")  # core's is Compare Images
    page.close_dialogs()


def test_a_table_of_warm_up_fits_without_a_line_that_wraps(page: FrontEnd, screenshots: Path) -> None:
    page.page.set_viewport_size({"width": 1456, "height": 819})
    page.place(["ResoluteWarmUp"])
    done = (WARMED, 72.51, 190 << 20, "24 region compiles, 1 captures")
    lines = table(Outcome("1024x1024", what, *done) for what in ("model", "VAE"))
    for vue in (False, True):
        page.renderer(vue)
        page.page.evaluate(SHOW, lines)
        page.stable()
        page.page.screenshot(path=screenshots / f"warm-up{'-nodes2' if vue else ''}.png")
        # A line has 16 pixels; the text of one begins and ends between them.
        assert round(page.page.evaluate(TEXT_HEIGHT) / 16) == len(lines.splitlines())


def test_two_results_fit_on_the_nodes_that_compile_two_things(page: FrontEnd) -> None:
    """A compile node's longest usual result, twice, on nodes as wide as ComfyUI makes them."""
    page.place(["ResoluteLoadCheckpoint", "ResoluteCompileVAE"])
    results = "1024x1024: compiled 10 regions in 105.3 s, 0.74 s/step\n1024x1024: compiled 5 regions in 29.1 s, 0.74 s"
    for vue in (False, True):
        page.renderer(vue)
        page.page.evaluate(SHOW, results)
        page.stable()
        assert set(page.texts().values()) == {results}
        assert page.cut_texts() == []
