"""The bundled workflows: files as ComfyUI saves them, and their API forms, generated from these files.

To change a workflow, open it in ComfyUI, save it over its file in ``workflows/``, and run ``python -m
scripts.workflows``, which writes ``workflows/api/``. A test fails until that is done. Needs only Python.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

from .places import ROOT

FOLDER = ROOT / "workflows"
NOTE = "MarkdownNote"  # a type that exists only in the browser
# The workflows with UNets; the others load large transformers.
UNETS = (
    "sd15_text_to_image", "sdxl_text_to_image", "oneflow_text_to_image", "resolution_tour", "image_to_image",
    "compare_with_stock", "deepcache", "deepcache_controlnet", "lcm_image_to_image",
)  # fmt: skip
# Files that the workflows with UNets load.
SD15, SDXL = "v1-5-pruned-emaonly-fp16.safetensors", "sd_xl_base_1.0.safetensors"
CONTROL_NET, LCM_LORA = "control_v11p_sd15_canny_fp16.safetensors", "pytorch_lora_weights.safetensors"
# The front end saves an extra value after a seed's value, and the folder's name after an image's value.
_AFTER_A_SEED, _AFTER_A_PICTURE = {"fixed", "increment", "decrement", "randomize"}, ["image"]

Json = dict[str, Any]


@functools.cache
def names() -> tuple[str, ...]:
    """Every bundled workflow: "sd15_text_to_image"."""
    return tuple(sorted(_titles()))


@functools.cache
def _titles() -> dict[str, str]:
    return {_read(path)["extra"]["resolute"]["template"]: path.stem for path in FOLDER.glob("*.json")}


def _read(path: Path) -> Json:
    loaded: Json = json.loads(path.read_text("utf-8"))
    return loaded


def transformers() -> list[str]:
    """The workflows that load large transformers."""
    return [name for name in names() if name not in UNETS]


def template(name: str) -> str:
    """The title of a workflow in the template browser, which shows and searches only file names."""
    return _titles()[name]


def ui(name: str) -> Json:
    """A workflow as the front end saves it."""
    return _read(FOLDER / f"{template(name)}.json")


def api(name: str) -> Json:
    """A workflow in the form that ``POST /prompt`` accepts."""
    return _read(FOLDER / "api" / f"{name}.json")


def prompt_of(graph: Json) -> Json:
    """Make the API form of a saved workflow. Raises ValueError if a node has values that belong to no widget."""
    sources = {link[0]: [str(link[1]), link[2]] for link in graph["links"]}
    prompt: Json = {}
    for node in graph["nodes"]:
        if node["type"] == NOTE:
            continue
        linked = {each["name"]: sources[each["link"]] for each in node["inputs"] if each["link"] is not None}
        inputs = {**_widgets(node), **linked}
        prompt[str(node["id"])] = {"inputs": inputs, "class_type": node["type"], "_meta": {"title": node["title"]}}
    return prompt


def _widgets(node: Json) -> Json:
    """The values of a node's widgets by name."""
    values, found = list(node["widgets_values"]), {}
    for each in node["inputs"]:
        if "widget" in each:
            found[each["name"]] = values.pop(0)
            if each["type"] == "INT" and values and values[0] in _AFTER_A_SEED:
                values.pop(0)
    if values not in ([], _AFTER_A_PICTURE):
        raise ValueError(f"Node {node['id']} ({node['type']}) has values that no widget has: {values}")
    return found


def main() -> int:
    """Write the API forms."""
    for name in names():
        path = FOLDER / "api" / f"{name}.json"
        path.write_text(json.dumps(prompt_of(ui(name)), indent=2, ensure_ascii=False) + "\n", "utf-8", newline="\n")
        print(path.relative_to(ROOT).as_posix())
    return 0


if __name__ == "__main__":
    sys.exit(main())
