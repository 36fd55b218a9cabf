"""Bundled workflows: both forms are the same graph, and the front end can show them."""

from __future__ import annotations

import itertools
import re
import struct
from typing import Any

import pytest

from compile_cache import sizes
from scripts.places import ROOT
from scripts.workflows import FOLDER, NOTE, Json, api, names, prompt_of, template, transformers, ui

THUMBNAIL_BYTES = 40_000
TITLE_HEIGHT = 30

each_workflow = pytest.mark.parametrize("name", names())


def nodes_of(prompt: Json, class_type: str) -> list[str]:
    return [node for node, about in prompt.items() if about["class_type"] == class_type]


def size_of(resolution: Json) -> sizes.Size:
    """The size that a Resolution node outputs."""
    inputs = dict(resolution["inputs"])
    assert inputs.pop("use") == "nearest valid"
    return sizes.resolve_size(**inputs)


def upstream(prompt: Json, start: str) -> set[str]:
    """Every node that ``start`` waits for."""
    found, open_nodes = set[str](), [start]
    while open_nodes:
        for value in prompt[open_nodes.pop()]["inputs"].values():
            if isinstance(value, list) and value[0] not in found:
                found.add(value[0])
                open_nodes.append(value[0])
    return found


def test_both_forms_are_the_same_graphs() -> None:
    assert len(names()) == 21
    assert len(transformers()) == 12
    assert {path.stem for path in (FOLDER / "api").glob("*.json")} == {*names()}
    assert [name for name in names() if api(name) != prompt_of(ui(name))] == []


def test_values_that_no_widget_has_are_an_error() -> None:
    graph = ui("sd15_text_to_image")
    graph["nodes"][0]["widgets_values"].append(1)
    with pytest.raises(ValueError, match=r"CheckpointLoaderSimple\) has values that no widget has: \[1\]"):
        prompt_of(graph)


@each_workflow
def test_each_link_is_listed_at_both_ends(name: str) -> None:
    graph = ui(name)
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert graph["last_node_id"] == max(nodes)
    assert graph["last_link_id"] == max(link[0] for link in graph["links"])
    for link, source, source_slot, target, target_slot, kind in graph["links"]:
        output = nodes[source]["outputs"][source_slot]
        socket = nodes[target]["inputs"][target_slot]
        assert link in output["links"]
        assert socket["link"] == link
        assert "*" in (socket["type"], kind) or socket["type"] == kind == output["type"]


@each_workflow
def test_a_template_has_its_name_one_note_and_a_small_thumbnail(name: str) -> None:
    graph = ui(name)
    about = graph["extra"]["resolute"]  # web/templates.js translates by it
    assert about["template"] == name
    assert {node["type"] for node in graph["nodes"]} <= about["names"].keys()
    (note,) = (node["widgets_values"][0] for node in graph["nodes"] if node["type"] == NOTE)
    assert note.startswith("## ")
    data = (FOLDER / f"{template(name)}.jpg").read_bytes()
    assert data[:3] == b"\xff\xd8\xff"
    assert len(data) <= THUMBNAIL_BYTES
    # The front end gives a picture a square place, and a wide one in it has letters that nobody can read.
    frame = data.index(b"\xff\xc0")
    assert data[frame + 5 : frame + 9] == struct.pack(">HH", 640, 640)


@each_workflow
def test_the_sizes_can_be_sampled(name: str) -> None:
    prompt = api(name)
    for node in nodes_of(prompt, "ResoluteResolution"):
        # The widgets must show the preset's size.
        inputs = prompt[node]["inputs"]
        assert size_of(prompt[node]) == sizes.Size(inputs["width"], inputs["height"])


@each_workflow
def test_nodes_do_not_overlap_and_are_inside_a_group(name: str) -> None:
    graph = ui(name)
    boxes = [(node, box(node)) for node in graph["nodes"]]
    groups = [corners(group["bounding"]) for group in graph["groups"]]
    for boxes_of_one_kind in ([each for _, each in boxes], groups):
        for first, second in itertools.combinations(boxes_of_one_kind, 2):
            assert not overlap(first, second)
    for node, its_box in boxes:
        if node["type"] != NOTE:
            assert sum(inside(its_box, group) for group in groups) == 1


@each_workflow
def test_a_workflow_opens_at_a_zoom_that_shows_text(name: str) -> None:
    graph = ui(name)
    left, top, right, bottom = zip(*map(box, graph["nodes"]), strict=True)
    # ComfyUI fits the nodes with a margin of 10 pixels into three quarters of the window.
    width, height = max(right) - min(left) + 20, max(bottom) - min(top) + 20
    smallest = 8 / 14  # of a text over the size of a title
    assert min(0.75 * 1456 / width, 0.75 * 819 / height) > smallest
    # LiteGraph draws 20 letters of a collapsed node.
    assert [
        each["title"] for each in graph["nodes"] if each["flags"].get("collapsed") and len(each["title"]) > 20
    ] == []


def test_the_tour_visits_five_sizes_with_one_model_before_its_report() -> None:
    prompt = api("resolution_tour")
    visited = [size_of(prompt[node]) for node in nodes_of(prompt, "ResoluteResolution")]
    assert len(set(visited)) == 5
    assert any(size.height > size.width for size in visited)
    assert any(size.width // 8 % 2 and size.height // 8 % 2 for size in visited)
    assert len({str(prompt[node]["inputs"]["model"]) for node in nodes_of(prompt, "KSampler")}) == 1
    (report,) = nodes_of(prompt, "ResoluteReport")
    assert {*nodes_of(prompt, "KSampler"), *nodes_of(prompt, "VAEDecode")} <= upstream(prompt, report)


def test_the_two_compared_branches_differ_only_in_the_compiled_nodes() -> None:
    prompt = api("compare_with_stock")
    (compare,) = nodes_of(prompt, "ResoluteCompareImages")
    mine, theirs = (prompt[compare]["inputs"][name][0] for name in ("image_a", "image_b"))
    samplers = [prompt[prompt[decoder]["inputs"]["samples"][0]]["inputs"] for decoder in (mine, theirs)]
    assert samplers[0].keys() == samplers[1].keys()
    assert {name for name, value in samplers[0].items() if value != samplers[1][name]} == {"model"}
    only_mine = {prompt[node]["class_type"] for node in upstream(prompt, mine) - upstream(prompt, theirs)}
    assert only_mine == {"ResoluteCompileModel", "ResoluteCompileVAEDecode", "KSampler"}
    shared = {prompt[node]["class_type"] for node in upstream(prompt, theirs)}
    assert not any(name.startswith("ResoluteCompile") for name in shared)


@pytest.mark.parametrize("page", sorted((ROOT / "web" / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_a_help_page_names_each_input_of_its_node(page: Any) -> None:
    text = page.read_text("utf-8")
    for heading in ("## Inputs", "## Outputs", "## Example", "## If something goes wrong"):
        assert heading in text
    inputs = {each["name"] for name in names() for node in ui(name)["nodes"] for each in _inputs_of(node, page.stem)}
    assert [name for name in inputs if not re.search(rf"`{name}`", text)] == []


def _inputs_of(node: Json, type_id: str) -> list[Json]:
    return node["inputs"] if node["type"] == type_id else []


def box(node: Json) -> tuple[float, float, float, float]:
    """Left, top, right, bottom of a node with its title."""
    (x, y), (width, height) = node["pos"], node["size"]
    return x, y - TITLE_HEIGHT, x + width, y + (0 if node["flags"].get("collapsed") else height)


def corners(bounding: list[float]) -> tuple[float, float, float, float]:
    x, y, width, height = bounding
    return x, y, x + width, y + height


def overlap(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
    return all(first[side] < second[side + 2] and second[side] < first[side + 2] for side in (0, 1))


def inside(inner: tuple[float, ...], outer: tuple[float, ...]) -> bool:
    return inner[0] >= outer[0] and inner[1] >= outer[1] and inner[2] <= outer[2] and inner[3] <= outer[3]
