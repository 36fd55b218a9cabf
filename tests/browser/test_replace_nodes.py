"""OneDiff's nodes in ComfyUI's own front end: a workflow opens, and a click on a node's menu replaces it by ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.workflows import SD15

from ..comfy.rig import node
from ..comfy.test_onediff import SAVED
from ..conftest import PACK_NAME
from .front_end import FrontEnd
from .prompts import stock

pytestmark = pytest.mark.browser

# As OneDiff's first version saved it: ModelSpeedup with one widget, a loader of core, and a sampler.
LINKS = [[1, 1, 0, 2, 0, "MODEL"], [2, 2, 0, 3, 0, "MODEL"], [3, 1, 2, 4, 0, "VAE"]]
WORKFLOW: dict[str, Any] = {
    "last_node_id": 4,
    "last_link_id": 3,
    "nodes": [
        {
            "id": 1,
            "type": "OneDiffCheckpointLoaderSimple",
            "pos": [0, 0],
            "size": [320, 120],
            "outputs": [
                {"name": "MODEL", "type": "MODEL", "links": [1]},
                {"name": "CLIP", "type": "CLIP", "links": []},
                {"name": "VAE", "type": "VAE", "links": [3]},
            ],
            "widgets_values": [SD15, "disable"],
        },
        {
            "id": 2,
            "type": "ModelSpeedup",
            "pos": [400, 0],
            "size": [320, 120],
            "inputs": [{"name": "model", "type": "MODEL", "link": 1}],
            "outputs": [{"name": "MODEL", "type": "MODEL", "links": [2]}],
            "widgets_values": ["enable"],
        },
        {
            "id": 3,
            "type": "KSampler",
            "pos": [800, 0],
            "size": [320, 260],
            "inputs": [{"name": "model", "type": "MODEL", "link": 2}],
            "outputs": [{"name": "LATENT", "type": "LATENT", "links": []}],
            "widgets_values": [1, "fixed", 20, 7.0, "euler", "normal", 1.0],
        },
        {
            "id": 4,
            "type": "VaeSpeedup",
            "pos": [400, 200],
            "size": [320, 120],
            "inputs": [{"name": "vae", "type": "VAE", "link": 3}],
            "outputs": [{"name": "VAE", "type": "VAE", "links": []}],
            "widgets_values": [True],
        },
    ],
    "links": LINKS,
    "groups": [],
    "config": {},
    "extra": {},
    "version": 0.4,
}
# The entries of our menu on the node of a type, by the extension's own hook; with `choose`, the entry is clicked.
MENU = """([type, choose]) => {
    const node = app.graph.nodes.find(n => n.type === type);
    const ours = app.extensions.find(e => e.name === 'resolute.replaceNodes');
    const items = ours.getNodeMenuItems(node).filter(Boolean);
    if (choose) items[0].callback();
    return items.map(item => item.content);
}"""
LOADED = "() => app.extensions.find(e => e.name === 'resolute.replaceNodes') !== undefined"
# What takes the place of each of these types without a booster, and the inputs of all of ComfyUI's nodes.
RECIPES = f"""async types => {{
    const {{ recipeOf }} = await import('/extensions/{PACK_NAME}/onediff.js');
    const recipes = types.map(type => [type, recipeOf({{ comfyClass: type }}, () => undefined)]);
    const known = await (await fetch('/object_info')).json();
    return {{ recipes: Object.fromEntries(recipes), known }};
}}"""


@pytest.fixture
def opened(page: FrontEnd) -> FrontEnd:
    page.page.wait_for_function(LOADED)
    page.load(WORKFLOW, "onediff")
    return page


def test_a_workflow_of_onediff_opens_without_a_complaint(opened: FrontEnd) -> None:
    assert opened.unknown_types() == []
    assert not any("Speedup" in text or "OneDiff" in text for text in opened.complaints())
    prompt = opened.prompt()
    assert prompt["1"]["inputs"] == {"ckpt_name": SD15, "vae_speedup": "disable"}
    assert prompt["2"]["class_type"] == "ModelSpeedup"
    assert prompt["2"]["inputs"]["model"] == ["1", 0]


def test_a_click_replaces_a_node_and_keeps_its_links(opened: FrontEnd) -> None:
    assert opened.page.evaluate(MENU, ["KSampler", False]) == []
    assert opened.page.evaluate(MENU, ["ModelSpeedup", True]) == ["Replace with Compile Model"]
    assert opened.page.evaluate(MENU, ["VaeSpeedup", True]) == ["Replace with Compile VAE Decode"]
    assert opened.page.evaluate(MENU, ["OneDiffCheckpointLoaderSimple", True]) == [
        "Replace with Load Checkpoint (Compiled)"
    ]
    prompt = opened.prompt()
    by_type = {part["class_type"]: (name, part["inputs"]) for name, part in prompt.items()}
    assert by_type.keys() == {
        "ResoluteLoadCheckpoint", "ResoluteCompileModel", "ResoluteCompileVAEDecode", "KSampler"
    }  # fmt: skip
    loader = by_type["ResoluteLoadCheckpoint"][0]
    assert by_type["ResoluteLoadCheckpoint"][1] == {"ckpt_name": SD15, "backend": "auto", "compile_vae": False}
    assert by_type["ResoluteCompileModel"][1]["model"] == [loader, 0]
    assert by_type["ResoluteCompileVAEDecode"][1]["vae"] == [loader, 2]
    assert by_type["KSampler"][1]["model"] == [by_type["ResoluteCompileModel"][0], 0]


def test_each_recipe_names_inputs_that_both_nodes_have(opened: FrontEnd) -> None:
    types = ["TorchCompileModel", *SAVED]
    found = opened.page.evaluate(RECIPES, types)
    known = found["known"]
    recipes = {old: recipe for old, recipe in found["recipes"].items() if recipe and recipe.get("type")}
    useful = {old for old in SAVED if not known[old]["display_name"].endswith("(no longer needed)")}
    assert {old for old in useful - recipes.keys() if not old.endswith("Booster")} == set()
    for old, recipe in recipes.items():
        assert {*recipe["inputs"].values()} <= {
            n for kind in ("required", "optional") for n in known[old]["input"].get(kind, {})
        }, old
        for new in (recipe, *recipe["after"]):
            given = known[new["type"]]["input"]
            named = {*new["values"], *(new["inputs"] if new is recipe else [new["input"]])}
            assert given["required"].keys() <= named <= {*given["required"], *given.get("optional", {})}, old


def test_the_menu_of_torch_compiles_node_names_ours(page: FrontEnd) -> None:
    page.place(["TorchCompileModel"])
    assert page.page.evaluate(MENU, ["TorchCompileModel", True]) == ["Replace with Compile Model"]
    assert page.page.evaluate("() => app.graph.nodes.map(node => node.type)") == ["ResoluteCompileModel"]


def test_a_node_of_onediff_keeps_its_saved_size(opened: FrontEnd) -> None:
    sizes = "() => Object.fromEntries(app.graph.nodes.map(node => [node.id, [...node.size].map(Math.round)]))"
    shown = opened.page.evaluate(sizes)
    least = {"1": [320, 126], "3": [320, 262]}  # what ComfyUI gives the rows of these two
    assert shown == {str(each["id"]): least.get(str(each["id"]), each["size"]) for each in WORKFLOW["nodes"]}
    assert opened.overlaps() == []


def onediff_prompt() -> dict[str, Any]:
    """Text to image as OneDiff's users built it, with a node that has nothing to do any more."""
    prompt = stock()
    prompt["1"] = node("OneDiffCheckpointLoaderSimple", ckpt_name=SD15, vae_speedup="disable")
    prompt["8"] = node("ModelSpeedup", model=["1", 0], inplace=False)
    prompt["9"] = node("BatchSizePatcher", model=["8", 0])
    prompt["5"]["inputs"]["model"] = ["9", 0]
    return prompt


@pytest.mark.long
def test_a_workflow_of_onediff_runs_says_what_it_became_and_is_replaced_with_a_click(
    page: FrontEnd, screenshots: Path
) -> None:
    page.load_prompt(onediff_prompt())
    page.fit_view()
    page.queue()
    assert page.wait(seconds=1500.0)["name"] == "execution_success"  # it compiles the whole model
    texts = page.texts()
    assert texts["Model Speedup → Compile Model"].startswith("144x112: ")
    assert "every batch size runs" in texts["Batch Size Patcher (no longer needed)"]
    page.page.screenshot(path=screenshots / "onediff.png")
    assert page.cut_texts() == []

    page.open_menu("Model Speedup → Compile Model")
    page.page.get_by_text("Replace with Compile Model").click()
    page.page.wait_for_function("() => app.graph.nodes.some(node => node.type === 'ResoluteCompileModel')")
    page.stable()
    page.page.screenshot(path=screenshots / "onediff-replaced.png")
    page.widgets({"EmptyLatentImage.width": 128})
    page.queue()
    assert page.wait()["name"] == "execution_success"
    assert page.texts()["Compile Model"].startswith("128x112: Compiled")
