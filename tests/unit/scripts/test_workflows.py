"""Bundled workflows: both forms are the same graph, and the front end can show them."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from compile_cache import sizes
from scripts.places import ROOT
from scripts.workflows import build, unets
from scripts.workflows.build import FOLDER
from scripts.workflows.graph import Graph
from scripts.workflows.node_types import FRONT_END_ONLY, NODE_TYPES, OURS

NAMES = (
    "compare_with_stock", "deepcache", "deepcache_controlnet", "flux_dev_text_to_image",
    "hunyuan_video15_text_to_video", "image_to_image", "lcm_image_to_image", "ltx2_text_to_video",
    "ltx_text_to_video", "minimax_h3_text_to_video", "oneflow_text_to_image", "qwen_image_edit",
    "qwen_image_text_to_image", "resolution_tour", "sd15_text_to_image", "sdxl_text_to_image", "wan22_image_to_video",
    "wan22_text_to_video", "z_image_turbo_int8_text_to_image", "z_image_turbo_text_to_image",
)  # fmt: skip
THUMBNAIL_BYTES = 40_000
TITLE_HEIGHT = 30

Json = dict[str, Any]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """Each bundled workflow."""
    return str(request.param)


@pytest.fixture
def ui(name: str) -> Json:
    """Its UI form, as on disk."""
    loaded: Json = json.loads((FOLDER / f"resolute_faster_compiled_{name}.json").read_text("utf-8"))
    return loaded


@pytest.fixture
def api(name: str) -> Json:
    """Its API form, as on disk."""
    return read_api(name)


def read_api(name: str) -> Json:
    loaded: Json = json.loads((FOLDER / "api" / f"{name}.json").read_text("utf-8"))
    return loaded


def prompt_of(ui: Json) -> Json:
    """Convert UI form to API form from the links table alone, independently of the generator."""
    sources = {link[0]: [str(link[1]), link[2]] for link in ui["links"]}
    prompt: Json = {}
    for node in ui["nodes"]:
        node_type = NODE_TYPES[node["type"]]
        if node_type.is_front_end_only:
            continue
        names = [widget.name for widget in node_type.widgets]
        inputs = dict(zip(names, node["widgets_values"], strict=True))
        inputs = {key: value for key, value in inputs.items() if key not in FRONT_END_ONLY}
        for socket in node["inputs"]:
            if socket["link"] is not None:
                inputs[socket["name"]] = sources[socket["link"]]
        title = {"title": node["title"]}
        prompt[str(node["id"])] = {"inputs": inputs, "class_type": node["type"], "_meta": title}
    return prompt


def size_of(resolution: Json) -> sizes.Size:
    """The size that a Resolution node outputs."""
    inputs = dict(resolution["inputs"])
    assert inputs.pop("use") == "exact"
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


def nodes_of(prompt: Json, class_type: str) -> list[str]:
    return [node for node, about in prompt.items() if about["class_type"] == class_type]


def test_the_files_are_up_to_date_with_the_generator() -> None:
    assert build.differing() == []


def test_the_generator_names_what_differs(tmp_path: Any) -> None:
    (tmp_path / "stray.json").write_text("{}", "utf-8")
    assert len(build.differing(tmp_path)) == 2 * len(NAMES) + 1


def test_exactly_these_workflows_are_bundled() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == sorted(
        f"resolute_faster_compiled_{name}" for name in NAMES
    )
    assert sorted(path.stem for path in (FOLDER / "api").glob("*.json")) == sorted(NAMES)


def test_both_forms_are_the_same_graph(ui: Json, api: Json) -> None:
    assert prompt_of(ui) == api


def test_only_stock_nodes_and_ours_are_used(ui: Json, api: Json) -> None:
    assert {node["type"] for node in ui["nodes"]} <= set(NODE_TYPES)
    assert {node["class_type"] for node in api.values()} <= set(NODE_TYPES)
    assert any(NODE_TYPES[node["class_type"]].is_ours for node in api.values())


def test_the_ui_form_has_the_schema_of_the_front_end(ui: Json) -> None:
    assert ui["version"] == 0.4
    assert {"id", "revision", "nodes", "links", "groups", "config", "extra"} <= set(ui)
    ids = [node["id"] for node in ui["nodes"]]
    links = [link[0] for link in ui["links"]]
    assert len(set(ids)) == len(ids)
    assert len(set(links)) == len(links)
    assert ui["last_node_id"] == max(ids)
    assert ui["last_link_id"] == max(links)


def test_each_link_is_listed_at_both_ends(ui: Json) -> None:
    nodes = {node["id"]: node for node in ui["nodes"]}
    for link, source, source_slot, target, target_slot, kind in ui["links"]:
        output = nodes[source]["outputs"][source_slot]
        socket = nodes[target]["inputs"][target_slot]
        assert link in output["links"]
        assert socket["link"] == link
        assert "*" in (socket["type"], kind) or socket["type"] == kind == output["type"]


def test_every_input_without_a_widget_is_linked(api: Json) -> None:
    for node in api.values():
        node_type = NODE_TYPES[node["class_type"]]
        wanted = {name for name, _ in node_type.inputs} - node_type.optional
        linked = {name for name, value in node["inputs"].items() if isinstance(value, list)}
        assert wanted <= linked


def test_the_sizes_can_be_sampled(api: Json) -> None:
    for node in nodes_of(api, "ResoluteResolution"):
        size = size_of(api[node])
        # The widgets must show the preset's size.
        assert size == sizes.Size(api[node]["inputs"]["width"], api[node]["inputs"]["height"])


def test_nodes_do_not_overlap_and_are_inside_a_group(ui: Json) -> None:
    boxes = {node["id"]: box(node) for node in ui["nodes"]}
    for first, second in itertools.combinations(boxes.values(), 2):
        assert not overlap(first, second)
    groups = [group["bounding"] for group in ui["groups"]]
    for first, second in itertools.combinations(map(corners, groups), 2):
        assert not overlap(first, second)
    for node in ui["nodes"]:
        if not NODE_TYPES[node["type"]].is_front_end_only:
            assert sum(inside(boxes[node["id"]], corners(group)) for group in groups) == 1


def test_links_run_from_left_to_right_or_down_a_frame(ui: Json) -> None:
    nodes = {node["id"]: node for node in ui["nodes"]}
    frames = [corners(group["bounding"]) for group in ui["groups"]]
    for _, source, _, target, *_ in ui["links"]:
        one, other = nodes[source], nodes[target]
        in_one_frame = any(inside(box(one), frame) and inside(box(other), frame) for frame in frames)
        is_below = box(one)[3] < box(other)[1] and (in_one_frame or one["type"] == other["type"])
        assert box(one)[2] < box(other)[0] or is_below


def test_titles_are_words(ui: Json) -> None:
    for node in ui["nodes"]:
        words = re.sub("LoRA|DeepCache|ControlNet", "", node["title"])
        assert not re.search(r"[a-z0-9][A-Z]|\d", words), node["title"]


def test_the_title_of_a_collapsed_node_is_not_cut(ui: Json) -> None:
    collapsed = [node["title"] for node in ui["nodes"] if node["flags"].get("collapsed")]
    assert [title for title in collapsed if len(title) > 20] == []  # letters that LiteGraph draws of it


def test_a_workflow_opens_at_a_zoom_that_shows_text(ui: Json) -> None:
    sides = zip(*map(box, ui["nodes"]), strict=True)
    left, top, right, bottom = sides
    # ComfyUI fits the nodes with a margin of 10 pixels into three quarters of the window.
    width, height = max(right) - min(left) + 20, max(bottom) - min(top) + 20
    assert (
        min(0.75 * 1456 / width, 0.75 * 819 / height) > 8 / 14
    )  # the smallest size of a text over the size of a title


def test_the_box_decides_the_form() -> None:
    graph = unets.deepcache()
    wide, tall = (extent(graph.ui(form)) for form in ((2400, 900), (900, 2400)))
    assert wide[0] > tall[0]
    assert wide[1] < tall[1]


def test_a_workflow_has_a_note(ui: Json) -> None:
    notes = [node for node in ui["nodes"] if NODE_TYPES[node["type"]].is_front_end_only]
    assert len(notes) == 1
    assert notes[0]["widgets_values"][0].startswith("## ")


def test_the_thumbnail_is_a_small_jpeg(name: str) -> None:
    data = (FOLDER / f"resolute_faster_compiled_{name}.jpg").read_bytes()
    assert data[:3] == b"\xff\xd8\xff"
    assert len(data) <= THUMBNAIL_BYTES


def test_the_tour_visits_five_sizes_with_one_model() -> None:
    prompt = read_api("resolution_tour")
    visited = [size_of(prompt[node]) for node in nodes_of(prompt, "ResoluteResolution")]
    assert {str(size) for size in visited} >= {"960x720", "896x768", "720x720"}
    assert len(set(visited)) == 5
    assert any(size.height > size.width for size in visited)
    assert any(size.width // 8 % 2 and size.height // 8 % 2 for size in visited)
    models = {str(prompt[node]["inputs"]["model"]) for node in nodes_of(prompt, "KSampler")}
    assert len(models) == 1


def test_the_report_of_the_tour_comes_after_every_size() -> None:
    prompt = read_api("resolution_tour")
    (report,) = nodes_of(prompt, "ResoluteReport")
    assert set(nodes_of(prompt, "KSampler")) <= upstream(prompt, report)
    assert set(nodes_of(prompt, "VAEDecode")) <= upstream(prompt, report)


def test_the_two_compared_branches_differ_only_in_the_compiled_nodes() -> None:
    prompt = read_api("compare_with_stock")
    (compare,) = nodes_of(prompt, "ResoluteCompareImages")
    mine, theirs = (prompt[compare]["inputs"][name][0] for name in ("image_a", "image_b"))
    samplers = [prompt[prompt[decoder]["inputs"]["samples"][0]]["inputs"] for decoder in (mine, theirs)]
    assert samplers[0].keys() == samplers[1].keys()
    assert {name for name, value in samplers[0].items() if value != samplers[1][name]} == {"model"}
    only_mine = upstream(prompt, mine) - upstream(prompt, theirs)
    ours = {prompt[node]["class_type"] for node in only_mine}
    assert ours == {"ResoluteCompileModel", "ResoluteCompileVAEDecode", "KSampler"}
    shared = {prompt[node]["class_type"] for node in upstream(prompt, theirs)}
    assert not any(name.startswith("ResoluteCompile") for name in shared)


@pytest.mark.parametrize("node_type", OURS, ids=lambda node_type: node_type.id)
def test_every_node_has_a_help_page(node_type: Any) -> None:
    text = (ROOT / "web" / "docs" / f"{node_type.id}.md").read_text("utf-8")
    assert text.startswith(f"# {node_type.title}\n")
    for heading in ("## Inputs", "## Outputs", "## Example", "## If something goes wrong"):
        assert heading in text
    for name in [slot for slot, _ in node_type.inputs] + [w.name for w in node_type.widgets]:
        assert f"`{name}`" in text


def test_a_link_of_the_wrong_type_or_to_no_input_is_refused() -> None:
    graph = Graph("wrong")
    group = graph.group("All")
    loader = graph.add(group, "CheckpointLoaderSimple")
    with pytest.raises(TypeError, match=r"VAEDecode\.vae takes VAE, not CLIP"):
        graph.add(group, "VAEDecode", vae=loader["CLIP"])
    with pytest.raises(KeyError, match="no input 'sample'"):
        graph.add(group, "VAEDecode", sample=loader["VAE"])
    with pytest.raises(KeyError, match="no output 'IMAGE'"):
        loader["IMAGE"]


def box(node: Json) -> tuple[float, float, float, float]:
    """Left, top, right, bottom of a node with its title."""
    (x, y), (width, height) = node["pos"], node["size"]
    return x, y - TITLE_HEIGHT, x + width, y + (0 if node["flags"].get("collapsed") else height)


def extent(ui: Json) -> tuple[float, float]:
    """Width and height of all nodes and frames."""
    sides = [*map(box, ui["nodes"]), *(corners(group["bounding"]) for group in ui["groups"])]
    left, top, right, bottom = zip(*sides, strict=True)
    return max(right) - min(left), max(bottom) - min(top)


def corners(bounding: list[float]) -> tuple[float, float, float, float]:
    x, y, width, height = bounding
    return x, y, x + width, y + height


def overlap(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
    return all(first[side] < second[side + 2] and second[side] < first[side + 2] for side in (0, 1))


def inside(inner: tuple[float, ...], outer: tuple[float, ...]) -> bool:
    return inner[0] >= outer[0] and inner[1] >= outer[1] and inner[2] <= outer[2] and inner[3] <= outer[3]
