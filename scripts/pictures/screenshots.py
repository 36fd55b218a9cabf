"""Makes the pictures of the README and of the nodes' help in a real browser.

``python -m scripts.pictures.screenshots --url http://127.0.0.1:8188`` needs a running ComfyUI with the pack,
playwright, Chromium and Pillow. ``scripts.pictures.thumbnails`` makes the thumbnails of the workflows.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

from PIL import Image

from ..browser.chromium import missing_requirement
from ..browser.front_end import FrontEnd, front_end
from ..places import ROOT
from ..workflows.graph import Graph
from ..workflows.unets import WORKFLOWS
from .jpeg import smallest_loss

README_PICTURE = ROOT / "docs" / "graph.png"
README_WORKFLOW = "sd15_text_to_image"
README_BYTES = 300_000
HELP = ROOT / "web" / "docs" / "images"
HELP_WORKFLOWS = {
    README_WORKFLOW: "compile",
    "image_to_image": "compile_vae",
    "deepcache": "deepcache",
    "resolution_tour": "tour",
    "compare_with_stock": "compare",
}
HELP_WIDTH = 1100
HELP_BYTES = 120_000


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="address of a running ComfyUI")
    parser.add_argument("--source", default="resolute", help="the pack's name in custom_nodes")
    options = parser.parse_args(arguments)
    problem = missing_requirement()
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    with front_end(options.url, pixel_ratio=1.5) as browser:
        browser.start()
        for build in WORKFLOWS:
            if build.__name__ in HELP_WORKFLOWS:
                _save_pictures(browser, build(), options.source)
    return 0


def _save_pictures(browser: FrontEnd, graph: Graph, source: str) -> None:
    browser.open_template(graph.template, source, len(graph.nodes))
    complaints = browser.complaints()
    if complaints:
        raise RuntimeError(f"{graph.name} does not open cleanly: {complaints}")
    wide = len(graph.groups) > 6
    picture = Image.open(io.BytesIO(browser.picture(0.6 if wide else 0.75))).convert("RGB")
    _save_help_picture(picture, HELP / f"{HELP_WORKFLOWS[graph.name]}.jpg")
    if graph.name == README_WORKFLOW:
        _save_readme_picture(picture, README_PICTURE)


def _save_help_picture(picture: Image.Image, path: Path) -> None:
    """Save it in the width of ComfyUI's help, with the best JPEG quality that fits HELP_BYTES."""
    small = picture.copy()
    small.thumbnail((HELP_WIDTH, 10 * HELP_WIDTH), Image.Resampling.LANCZOS)
    _write(path, smallest_loss(small, HELP_BYTES))


def _save_readme_picture(picture: Image.Image, path: Path) -> None:
    data = io.BytesIO()
    picture.save(data, "PNG", optimize=True)
    if len(data.getvalue()) > README_BYTES:
        raise RuntimeError(f"{path.name} has {len(data.getvalue())} bytes, over {README_BYTES}.")
    _write(path, data.getvalue())


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    print(f"{path.relative_to(ROOT)}: {len(data) / 1000:.0f} kB")


if __name__ == "__main__":
    sys.exit(main())
