"""The bundled workflows in ComfyUI's own front end: found by search, opened, run, and nothing lies over anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.browser.front_end import EMPTY, FrontEnd
from scripts.server.process import ComfyServer
from scripts.workflows.build import FOLDER
from scripts.workflows.graph import Graph
from scripts.workflows.node_types import FRONT_END_ONLY, NODE_TYPES, OURS
from scripts.workflows.unets import WORKFLOWS

pytestmark = pytest.mark.browser
PACK = "resolute"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.json"))
GRAPHS = {graph.name: graph for graph in (build() for build in WORKFLOWS)}
# Small and quick on a CPU. Compiled, the same prompts run in tests/comfy/test_workflows.py.
SMALL = {
    "ResoluteResolution.preset": "custom",
    "ResoluteResolution.width": 72,
    "ResoluteResolution.height": 64,
    "KSampler.steps": 2,
    "ResoluteLoadCheckpoint.backend": "eager",
    "ResoluteCompileModel.backend": "eager",
    "ResoluteCompileVAE.backend": "eager",
    "ResoluteCompileVAEDecode.backend": "eager",
    "ResoluteCompileControlNet.backend": "eager",
}
RESULT = "72x64: "


# Of the rest, scripts/test --browser --long opens each too: they take ten to twenty seconds.
SHORT = ("compare_with_stock", "sd15_text_to_image")


@pytest.fixture(
    params=[name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in sorted(GRAPHS)]
)
def graph(request: pytest.FixtureRequest) -> Graph:
    """Each bundled workflow."""
    return GRAPHS[request.param]


def written_prompt(name: str) -> dict[str, Any]:
    """The API form on disk."""
    loaded: dict[str, Any] = json.loads((FOLDER / "api" / f"{name}.json").read_text("utf-8"))
    return loaded


def test_a_template_opens_runs_and_nothing_overlaps(page: FrontEnd, graph: Graph, screenshots: Path) -> None:
    page.open_template(graph.template, PACK, len(graph.nodes))
    assert page.unknown_types() == []
    assert page.prompt() == written_prompt(graph.name)
    page.widgets(SMALL)
    page.queue()
    assert page.wait()["name"] == "execution_success"
    assert page.complaints() == []
    shown = page.texts()
    for title in ("Compile Model", "Compile VAE Decode", "Load Checkpoint (Compiled)"):
        assert title not in shown or shown[title].startswith(RESULT), shown
    for vue in (False, True):
        page.renderer(vue)
        page.fit_view()
        page.wait_for_pictures()
        page.page.screenshot(path=screenshots / f"{graph.name}{'-nodes2' if vue else ''}.png")
        assert page.overlaps() == []
        assert page.outside_groups() == []
        assert page.cut_texts() == []


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - {graph.template for graph in GRAPHS.values()}))
def test_a_template_of_a_large_family_opens_and_nothing_overlaps(page: FrontEnd, screenshots: Path, name: str) -> None:
    """It is not run: its models are not here."""
    saved = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    page.open_template(name, PACK, len(saved["nodes"]))
    assert page.unknown_types() == []
    for vue in (False, True):
        page.renderer(vue)
        page.fit_view()
        page.page.screenshot(path=screenshots / f"{name}{'-nodes2' if vue else ''}.png")
        assert page.overlaps() == []
        assert page.outside_groups() == []
        assert page.cut_texts() == []


@pytest.mark.long
def test_a_search_among_all_templates_finds_ours(browser: FrontEnd, screenshots: Path) -> None:
    browser.load_page(all_templates=True)
    browser.browse_templates()
    for words in ("resolute", "compile", "faster"):
        browser.page.locator("[role=dialog] input").first.fill(words)
        for name in TEMPLATES:
            browser.page.wait_for_selector(f"[data-testid=template-workflow-{name}]")
        browser.stable()
        browser.page.screenshot(path=screenshots / f"templates-{words}.png")


@pytest.mark.parametrize(
    "name",
    [name if "tour" in name else pytest.param(name, marks=pytest.mark.long) for name in TEMPLATES],
)
def test_titles_can_be_read_when_a_template_opens(page: FrontEnd, screenshots: Path, name: str) -> None:
    count = len(json.loads((FOLDER / f"{name}.json").read_text("utf-8"))["nodes"])
    for width, height in ((1456, 819), (1920, 1080)):
        page.page.set_viewport_size({"width": width, "height": height})
        page.load(EMPTY, "empty")
        page.open_template(name, PACK, count)
        assert page.page.evaluate("() => app.canvas.ds.scale < 1 && !app.canvas.low_quality")
        assert page.page.evaluate("() => app.extensionManager.setting.get('LiteGraph.Canvas.MinFontSizeForLOD')") == 8
        page.page.screenshot(path=screenshots / f"opened-{name}-{width}.png")


def test_a_dropped_file_opens_as_well(page: FrontEnd) -> None:
    graph = GRAPHS["sd15_text_to_image"]
    page.drop(FOLDER / f"{graph.template}.json", len(graph.nodes))
    assert page.prompt() == written_prompt(graph.name)


def test_a_missing_node_is_detected(page: FrontEnd) -> None:
    workflow = GRAPHS["sd15_text_to_image"].ui()
    workflow["nodes"][1]["type"] = "ResoluteNoSuchNode"
    page.load(workflow, "broken")
    assert page.unknown_types() == ["ResoluteNoSuchNode"]
    named = "() => document.querySelector('[data-testid=error-overlay]')?.innerText.includes('ResoluteNoSuchNode')"
    page.page.wait_for_function(named)


def test_the_template_browser_lists_each_workflow_with_a_thumbnail(server: ComfyServer) -> None:
    listed = server.client.get("/api/workflow_templates")
    assert sorted(listed[PACK]) == TEMPLATES
    for name in TEMPLATES:
        thumbnail = server.client.raw(f"/api/workflow_templates/{PACK}/{name}.jpg")
        assert thumbnail == (FOLDER / f"{name}.jpg").read_bytes()


@pytest.mark.parametrize("node_type", OURS, ids=lambda node_type: node_type.id)
def test_the_help_page_of_a_node_is_served(server: ComfyServer, node_type: Any) -> None:
    page = server.client.raw(f"/extensions/{PACK}/docs/{node_type.id}.md").decode()
    assert page.startswith(f"# {node_type.title}\n")


@pytest.mark.parametrize("type_id", sorted(NODE_TYPES))
def test_a_node_types_description_equals_the_servers(server: ComfyServer, type_id: str) -> None:
    node_type = NODE_TYPES[type_id]
    if node_type.is_front_end_only:
        return
    about = server.client.get(f"/object_info/{type_id}")[type_id]
    required, optional = (
        {name: "COMBO" if isinstance(kind, list) else kind for name, (kind, *_) in about["input"].get(part, {}).items()}
        for part in ("required", "optional")
    )
    ours = dict(node_type.inputs)
    ours |= {w.name: w.type for w in node_type.widgets if w.name not in FRONT_END_ONLY}
    # A bundled workflow may leave out optional inputs of a stock node.
    assert required.items() <= ours.items() <= {**required, **optional}.items()
    # Newer versions may append outputs; links use only the first ones.
    assert [kind for _, kind in node_type.outputs] == about["output"][: len(node_type.outputs)]
    if node_type.is_ours:
        assert ours == {**required, **optional}
        assert about["display_name"] == node_type.title
        assert about["category"] == "Resolute"
        assert [name for name, _ in node_type.outputs] == about["output_name"]


@pytest.mark.parametrize("node_type", OURS, ids=lambda node_type: node_type.id)
def test_every_input_and_output_of_our_nodes_has_a_tooltip(server: ComfyServer, node_type: Any) -> None:
    about = server.client.get(f"/object_info/{node_type.id}")[node_type.id]
    for kind in ("required", "optional"):
        for name, declaration in about["input"].get(kind, {}).items():
            assert declaration[1].get("tooltip"), name
    assert all(about["output_tooltips"])


@pytest.mark.parametrize("type_id", ["ResoluteLoadCheckpoint", "ResoluteResolution"])
def test_choices_and_defaults_equal_the_servers(server: ComfyServer, type_id: str) -> None:
    about = server.client.get(f"/object_info/{type_id}")[type_id]["input"]
    inputs = {**about["required"], **about.get("optional", {})}
    for widget in NODE_TYPES[type_id].widgets:
        if widget.name != "ckpt_name":
            assert inputs[widget.name][1]["default"] == widget.default
