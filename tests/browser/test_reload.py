"""Nodes keep their texts when the page is loaded anew; the switch and an undo change them at once."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import pytest

from scripts.server.process import ComfyServer

from ..comfy.rig import node
from . import front_end_scripts
from .front_end import DIALOG, EMPTY, FrontEnd
from .prompts import PICTURE, compiled, stock

pytestmark = pytest.mark.browser
OFF = "Resolute is off: this runs as without it"
SHOWS = """text => app.graph.nodes.some(node => node.widgets?.some(
    widget => widget.name === '$$node-text-preview' && widget.element.innerText === text))"""
SAVED = "() => app.graph.serialize()"
COLOURS = "() => app.graph.nodes.filter(node => node.type.startsWith('ResoluteCompile')).map(node => node.bgcolor)"
# The boxes of our nodes on the screen, and where the panel ends.
BOXES = """() => app.graph.nodes.filter(node => node.type.startsWith('ResoluteCompile')).map(node => {
    const box = app.canvas.canvas.getBoundingClientRect(), {scale, offset} = app.canvas.ds;
    const at = (value, axis, origin) => (value + offset[axis]) * scale + origin;
    return [at(node.pos[0], 0, box.left), at(node.pos[1], 1, box.top),
            at(node.pos[0] + node.size[0], 0, box.left), at(node.pos[1] + node.size[1], 1, box.top)];
})"""


def test_nodes_keep_their_texts_over_a_reload_and_follow_the_switch(page: FrontEnd, screenshots: Path) -> None:
    prompt = compiled(seed=31)
    prompt["8"]["inputs"]["backend"] = "eager"
    prompt["9"] = node("ResoluteReport", any=["6", 0])
    page.load_prompt(prompt)
    page.load(page.page.evaluate(SAVED), "small")  # as a file, which has an id
    page.queue()
    assert page.wait()["name"] == "execution_success"
    before = page.texts()
    assert before["Compile Model"].startswith("144x112: ")
    assert "region compiles" in before["Graph Cache Report"]

    page.open_panel()
    switch = page.page.locator("[data-action=switch]")
    switch.click()
    page.page.wait_for_function(SHOWS, arg=OFF)  # at once, without a prompt
    assert page.texts() == {**before, "Compile Model": OFF}
    switch.click()
    page.page.wait_for_function(SHOWS, arg=before["Compile Model"])
    assert page.texts() == before

    saved = page.page.evaluate(SAVED)
    page.load(EMPTY, "empty")
    page.load_page()
    page.load(saved, "saved")
    page.page.wait_for_function(SHOWS, arg=before["Compile Model"])
    assert page.texts() == before
    page.page.set_viewport_size({"width": 1456, "height": 819})
    page.fit_view()
    page.page.screenshot(path=screenshots / "reloaded.png")
    assert page.cut_texts() == []
    # Nodes with the same numbers in another workflow show nothing of this one.
    page.load_prompt(prompt)
    page.stable()
    assert page.texts()["Compile Model"] == "Press Run"
    page.load({**saved, "id": None}, "other")
    assert page.texts()["Compile Model"] == "Press Run"


def test_a_node_says_that_its_prompt_waits_and_that_nothing_is_queued_any_more(
    page: FrontEnd, server: ComfyServer
) -> None:
    before = stock(seed=33)
    before["5"]["inputs"]["steps"] = 10_000
    server.client.queue(before)
    page.load_prompt(compiled(seed=34))
    page.queue()
    page.page.wait_for_function(SHOWS, arg="Waiting for its turn")
    server.client.post("/queue", {"clear": True})
    server.client.interrupt()
    page.page.wait_for_function(SHOWS, arg="Press Run")


def test_a_result_of_measure_is_on_its_node_after_a_reload(page: FrontEnd) -> None:
    prompt = compiled(width=128, height=104)
    prompt["9"] = node("ResoluteCompileVAEDecode", vae=["1", 2], backend="eager")
    prompt["6"]["inputs"]["vae"] = ["9", 0]
    page.load_prompt(prompt)
    page.load(page.page.evaluate(SAVED), "measured")  # as a file, which has an id
    page.open_panel()
    page.page.locator("[data-action=measure]").click()
    page.page.locator(".resolute-said", has_text=re.compile(PICTURE)).wait_for(timeout=300_000)
    texts = page.texts()
    assert texts["Compile VAE Decode"].startswith("128x104: ")
    saved = page.page.evaluate(SAVED)
    page.load(EMPTY, "empty")
    page.load_page()
    page.load(saved, "saved")
    page.page.wait_for_function(SHOWS, arg=f"{texts['Compile Model']}, measured on {datetime.date.today()}")
    assert page.cut_texts() == []
    assert page.texts()["Compile VAE Decode"] == texts["Compile VAE Decode"]


def test_nodes_that_are_added_are_in_colour_and_in_view_and_their_sentence_goes_with_them(
    page: FrontEnd, screenshots: Path
) -> None:
    tab = page.page
    tab.set_viewport_size({"width": 1456, "height": 819})
    page.load_prompt(stock(seed=32))
    page.open_panel()
    tab.evaluate("() => { app.canvas.ds.offset = [-5000, 3000]; app.canvas.setDirty(true, true); }")
    tab.locator("[data-action=add]").click()
    said = tab.locator(".resolute-said")
    said.filter(has_text="Added 1 × Compile Model, 1 × Compile VAE Decode. Ctrl+Z takes all back.").wait_for()
    page.stable()
    tab.screenshot(path=screenshots / "added.png")
    assert tab.evaluate(COLOURS) == ["#355", "#355"]
    panel = tab.locator(".resolute-panel").bounding_box()
    assert panel is not None
    boxes = tab.evaluate(BOXES)
    assert len(boxes) == 2
    for left, top, right, bottom in boxes:
        assert panel["x"] + panel["width"] <= left < right <= 1456
        assert 0 <= top < bottom <= 819
    tab.locator("canvas#graph-canvas").focus()
    tab.keyboard.press("Control+z")
    said.filter(has_text="Added").wait_for(state="detached")
    assert tab.evaluate(COLOURS) == []
    assert said.inner_text() == ""


def test_a_workflow_without_a_sampler_is_said_on_the_screen(page: FrontEnd) -> None:
    tab = page.page
    errors = list[str]()
    tab.on("pageerror", lambda error: errors.append(str(error)))
    page.open_panel()
    said = tab.locator(".resolute-said.resolute-failed")
    for action in ("add", "warm-up"):  # Add stays where nothing can be added
        tab.locator(f"[data-action={action}]").click()
        said.filter(has_text="This workflow has no sampler and no decode to compile.").wait_for()
        tab.locator("[data-action=copy]").click()
        said.wait_for(state="detached")
    assert errors == []


SETTING = "name => app.extensionManager.setting.get(name)"


def test_a_preset_says_that_a_setting_of_it_was_changed(page: FrontEnd, screenshots: Path) -> None:
    tab = page.page
    tab.set_viewport_size({"width": 1456, "height": 819})

    def preset() -> str:
        return str(tab.evaluate(SETTING, "Resolute.Preset"))

    try:
        assert preset() == "fast"
        page.settings({"Resolute.Preset": "small card"})
        tab.wait_for_function(f"() => ({SETTING})('Resolute.Workers') === 2")
        page.settings({"Resolute.Workers": 3})
        assert preset() == "small card, changed"
        tab.evaluate(front_end_scripts.COMMAND, "Comfy.ShowSettingsDialog")
        tab.locator(DIALOG).get_by_text("Resolute", exact=True).first.click()
        entry = tab.locator(DIALOG).locator(".setting-item", has_text="Preset")
        entry.get_by_text("small card, changed").wait_for()
        tab.screenshot(path=screenshots / "preset-changed.png")
        entry.get_by_role("combobox").click()
        options = tab.get_by_role("option")
        assert options.all_inner_texts() == ["fast", "small card", "safe", "small card, changed"]
        tab.screenshot(path=screenshots / "preset-options.png")
        options.first.click()
        tab.wait_for_function(f"() => ({SETTING})('Resolute.Workers') === -1")
        assert preset() == "fast"
        page.settings({"Resolute.Workers": 3})
        assert preset() == "fast, changed"
        page.settings({"Resolute.Workers": -1})
        assert preset() == "fast"
    finally:
        page.settings({"Resolute.Preset": "fast"})
        page.load_page()  # without the dialog
