"""Add Resolute, and the switch, on templates of ComfyUI's own: what is queued, that it runs, and that a key undoes it.

Their models are not here, so small ones take their place when a prompt runs.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from scripts.server.process import ComfyServer

from .front_end import FrontEnd
from .small_templates import STEPS, small

pytestmark = pytest.mark.browser
TEMPLATES = (
    pytest.param("sdxl_simple_example", marks=pytest.mark.long),
    "flux_dev_full_text_to_image",
    "image_z_image_turbo",
    "text_to_video_wan",
    "image_qwen_image_edit_2509",
)
FETCH = "async name => (await (await fetch(`/templates/${name}.json`)).json())"
# Types of all nodes, those inside subgraphs included.
TYPES = """() => {
    const all = graph => graph.nodes.flatMap(node => [node.type, ...(node.subgraph ? all(node.subgraph) : [])]);
    return all(app.graph).sort();
}"""
OURS = ("ResoluteCompileModel", "ResoluteCompileVAEDecode")


def opened(page: FrontEnd, name: str) -> None:
    page.load(page.page.evaluate(FETCH, name), name)
    page.close_dialogs()  # about models that are missing


def targets(prompt: dict[str, Any], kind: str) -> list[str]:
    """Ids of the samplers' or guiders' nodes (kind: model) or decoders (kind: vae)."""
    names = {"model": ("KSampler", "SamplerCustom", "Guider"), "vae": ("VAEDecode",)}[kind]
    return [name for name, part in prompt.items() if any(each in part["class_type"] for each in names)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_resolute_is_added_to_a_template_and_one_key_takes_it_back(
    page: FrontEnd, server: ComfyServer, screenshots: Path, name: str
) -> None:
    opened(page, name)
    before, stock = page.page.evaluate(TYPES), page.prompt()
    assert targets(stock, "model")
    assert targets(stock, "vae")
    page.open_panel()
    page.page.locator("[data-action=add]").click()
    said = page.page.locator(".resolute-said", has_text="Added ")
    said.wait_for()
    inside = "() => app.graph.nodes.every(node => !node.type.startsWith('ResoluteCompile'))"
    assert ("In subgraphs: 2 of them (" in said.inner_text()) == page.page.evaluate(inside)
    page.fit_view()
    page.page.screenshot(path=screenshots / f"added-{name}.png")
    prompt = page.prompt()
    for kind, ours in zip(("model", "vae"), OURS, strict=True):
        for target in targets(stock, kind):
            source = prompt[target]["inputs"].get(kind)
            if source is not None:
                assert prompt[source[0]]["class_type"] == ours, (target, source)
    calls = server.client.get("/resolute/cache")["counters"]["eager_calls"]
    server.client.run(small(name, prompt))
    ran = server.client.get("/resolute/cache")["counters"]["eager_calls"]
    assert ran >= calls + STEPS
    # Without our nodes it is the same prompt.
    links = {
        (made, 0): part["inputs"]["model" if part["class_type"] == OURS[0] else "vae"]
        for made, part in prompt.items()
        if part["class_type"] in OURS
    }
    rest = {made: part for made, part in copy.deepcopy(prompt).items() if part["class_type"] not in OURS}
    for part in rest.values():
        part["inputs"] = {
            key: links.get((value[0], value[1]), value) if isinstance(value, list) and len(value) == 2 else value
            for key, value in part["inputs"].items()
        }
    assert rest == stock
    page.page.locator("[data-action=switch]").click()
    off = page.prompt()
    assert all(part["inputs"].get("resolute") == "off" for part in off.values() if part["class_type"] in OURS)
    server.client.run(small(name, off))
    assert server.client.get("/resolute/cache")["counters"]["eager_calls"] == ran, "off runs as without it"
    page.page.locator("canvas#graph-canvas").focus()
    page.page.keyboard.press("Control+z")  # the switch
    page.page.wait_for_function("() => document.querySelector('[data-action=switch]').ariaChecked === 'true'")
    page.page.keyboard.press("Control+z")
    page.page.wait_for_function(f"before => JSON.stringify(({TYPES})()) === JSON.stringify(before)", arg=before)
