"""The bundled workflows in ComfyUI's own front end: found by search, opened, run, and nothing lies over anything."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest

from scripts.places import ROOT
from scripts.server.process import ComfyServer
from scripts.workflows import FOLDER, NOTE, UNETS, Json, api, names, template, transformers, ui

from .front_end import EMPTY, FrontEnd
from .prompts import EAGER

pytestmark = pytest.mark.browser
PACK = "resolute"
TEMPLATES = [template(name) for name in names()]
# One node of each type in the bundled workflows.
NODES = {node["type"]: node for name in names() for node in ui(name)["nodes"] if node["type"] != NOTE}
HELP = sorted((ROOT / "web" / "docs").glob("*.md"))
# Small and quick on a CPU. Compiled, the same prompts run in tests/comfy/test_workflows.py.
SMALL = {
    "ResoluteResolution.preset": "custom",
    "ResoluteResolution.width": 72,
    "ResoluteResolution.height": 64,
    "KSampler.steps": 2,
    **EAGER,
}
RESULT = "72x64: "


# Of the rest, scripts/test --browser --long opens each too: they take ten to twenty seconds.
SHORT = ("compare_with_stock", "sd15_text_to_image")


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in sorted(UNETS)]
)
def test_a_template_opens_runs_and_nothing_overlaps(page: FrontEnd, name: str, screenshots: Path) -> None:
    page.open_template(template(name), PACK, len(ui(name)["nodes"]))
    assert page.unknown_types() == []
    assert page.prompt() == api(name)
    page.widgets(SMALL)
    page.queue()
    assert page.wait()["name"] == "execution_success"
    assert page.complaints() == []
    shown = page.texts()
    for title in ("Compile Model", "Compile VAE Decode", "Load Checkpoint (Compiled)"):
        assert title not in shown or shown[title].startswith(RESULT), shown
    assert_tidy(page, screenshots, name)


def assert_tidy(page: FrontEnd, screenshots: Path, name: str) -> None:
    """Assert for both renderers that nothing overlaps or is cut; a screenshot of each is for a person."""
    for vue in (False, True):
        page.renderer(vue)
        page.fit_view()
        page.wait_for_pictures()
        page.page.screenshot(path=screenshots / f"{name}{'-nodes2' if vue else ''}.png")
        assert page.overlaps() == []
        assert page.outside_groups() == []
        assert page.cut_texts() == []


def as_in_file(page: FrontEnd, name: str) -> Json:
    """The prompt without optional inputs at their defaults that the file lacks: older versions of ComfyUI do too."""
    prompt: Json = page.prompt()
    types = page.page.evaluate("async () => (await app.api.fetchApi('/object_info')).json()")
    for number, node in prompt.items():
        optional = types[node["class_type"]]["input"].get("optional", {})
        for key in [key for key in optional if key not in api(name)[number]["inputs"]]:
            if node["inputs"].get(key) == optional[key][1].get("default"):
                node["inputs"].pop(key, None)
    return prompt


@pytest.mark.long
@pytest.mark.parametrize("name", transformers())
def test_a_template_of_a_large_family_opens_and_nothing_overlaps(page: FrontEnd, screenshots: Path, name: str) -> None:
    """It is not run: its models are not here."""
    page.open_template(template(name), PACK, len(ui(name)["nodes"]))
    assert page.unknown_types() == []
    assert as_in_file(page, name) == api(name)
    assert_tidy(page, screenshots, name)


@pytest.mark.long
def test_a_search_among_all_templates_finds_ours(browser: FrontEnd, screenshots: Path) -> None:
    browser.load_page(all_templates=True)
    browser.browse_templates()
    one = {"accelerate": "benchmark", "benchmark": "benchmark", "onediff": "OneFlow", "turbo": "Z-Image Turbo"}
    for words in ("resolute", "compile", "faster", "speed up", *one):
        browser.page.locator("[role=dialog] input").first.fill(words)
        for name in TEMPLATES:
            if one.get(words, "") in name:
                browser.page.get_by_test_id(f"template-workflow-{name}").wait_for()
        browser.stable()
        browser.page.screenshot(path=screenshots / f"templates-{words}.png")


# The titles in the order of the page, and whether so many letters fit into a line of each.
LISTED = """letters => [...document.querySelectorAll('[data-testid^=template-workflow-] h3')].map(title => {
    const pen = document.createElement('canvas').getContext('2d');
    pen.font = getComputedStyle(title).font;
    return [title.innerText, pen.measureText(title.innerText.slice(0, letters)).width <= title.clientWidth];
})"""


def test_titles_can_be_told_apart_and_todays_models_come_first(page: FrontEnd, screenshots: Path) -> None:
    page.page.set_viewport_size({"width": 1456, "height": 819})
    page.browse_templates(PACK)
    page.page.get_by_test_id(f"template-workflow-{TEMPLATES[0]}").wait_for()
    page.stable()
    page.page.screenshot(path=screenshots / "templates-pack.png")
    letters = 24
    listed = page.page.evaluate(LISTED, letters)
    titles = [title for title, _ in listed]
    assert [title for title, fits in listed if not fits] == []
    assert sorted(titles) == sorted(TEMPLATES)
    assert len({title[:letters] for title in titles}) == len(TEMPLATES)
    assert [title.split(",")[0] for title in titles[:4]] == [
        "Z-Image Turbo", "Z-Image Turbo from 16 bits", "Z-Image Turbo in int8", "Qwen-Image"
    ]  # fmt: skip
    assert [title.split(" ")[0].rstrip(",") for title in titles[-9:]] == ["SDXL"] * 2 + ["SD1.5"] * 7


@pytest.mark.parametrize(
    "name",
    [name if "tour" in name else pytest.param(name, marks=pytest.mark.long) for name in names()],
)
def test_titles_can_be_read_when_a_template_opens(page: FrontEnd, screenshots: Path, name: str) -> None:
    for width, height in ((1456, 819), (1920, 1080)):
        page.page.set_viewport_size({"width": width, "height": height})
        page.load(EMPTY, "empty")
        page.open_template(template(name), PACK, len(ui(name)["nodes"]))
        assert page.page.evaluate("() => app.canvas.ds.scale < 1 && !app.canvas.low_quality")
        assert page.page.evaluate("() => app.extensionManager.setting.get('LiteGraph.Canvas.MinFontSizeForLOD')") == 8
        page.page.screenshot(path=screenshots / f"opened-{name}-{width}.png")


def test_a_dropped_file_opens_as_well(page: FrontEnd) -> None:
    name = "sd15_text_to_image"
    page.drop(FOLDER / f"{template(name)}.json", len(ui(name)["nodes"]))
    assert page.prompt() == api(name)


def test_a_missing_node_is_detected(page: FrontEnd) -> None:
    workflow = ui("sd15_text_to_image")
    workflow["nodes"][1]["type"] = "ResoluteNoSuchNode"
    page.load(workflow, "broken")
    assert page.unknown_types() == ["ResoluteNoSuchNode"]
    named = "() => document.querySelector('[data-testid=error-overlay]')?.innerText.includes('ResoluteNoSuchNode')"
    page.page.wait_for_function(named)


def test_the_template_browser_lists_each_workflow_with_a_thumbnail(server: ComfyServer) -> None:
    listed = server.client.get("/api/workflow_templates")
    assert sorted(listed[PACK]) == sorted(TEMPLATES)
    for name in TEMPLATES:
        thumbnail = server.client.raw(f"/api/workflow_templates/{PACK}/{quote(name)}.jpg")
        assert thumbnail == (FOLDER / f"{name}.jpg").read_bytes()


@pytest.mark.parametrize("file", HELP, ids=lambda file: file.stem)
def test_a_node_of_ours_has_its_help_page_and_tooltips(server: ComfyServer, file: Path) -> None:
    about = server.client.get(f"/object_info/{file.stem}")[file.stem]
    page = server.client.raw(f"/extensions/{PACK}/docs/{file.name}").decode()
    assert page.startswith(f"# {about['display_name']}\n")
    assert about["category"] == "Resolute"
    declared = {name: each for kind in ("required", "optional") for name, each in about["input"].get(kind, {}).items()}
    assert [name for name, each in declared.items() if not each[1].get("tooltip")] == []
    assert all(about["output_tooltips"])


@pytest.mark.parametrize("type_id", sorted(NODES))
def test_a_bundled_node_has_the_sockets_of_the_servers(server: ComfyServer, type_id: str) -> None:
    node: Json = NODES[type_id]
    about = server.client.get(f"/object_info/{type_id}")[type_id]
    required, optional = (
        {name: "COMBO" if isinstance(kind, list) else kind for name, (kind, *_) in about["input"].get(part, {}).items()}
        for part in ("required", "optional")
    )
    saved = {each["name"]: each["type"] for each in node["inputs"]}
    # A bundled workflow may leave out optional inputs of a stock node.
    assert required.items() <= saved.items() <= {**required, **optional}.items()
    # Newer versions may append outputs; links use only the first ones.
    outputs = [each["type"] for each in node["outputs"]]
    assert outputs == about["output"][: len(outputs)]
    if type_id.startswith("Resolute"):
        assert saved == {**required, **optional}
        assert [each["name"] for each in node["outputs"]] == about["output_name"]
