"""Makes the pictures of the README, of the nodes' help and of docs/first-steps.md.

``python -m scripts.commands.screenshots --url http://127.0.0.1:8188`` opens bundled workflows in a real browser: it
needs a running ComfyUI with the pack, playwright, Chromium and Pillow. ``--first-steps`` takes the screenshots that
``scripts/test --browser --long -- -k first_steps`` puts into ``screenshots``, and needs Pillow only.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

from PIL import Image

from .. import workflows
from ..browser.chromium import missing_requirement
from ..browser.front_end import FrontEnd, front_end
from ..places import ROOT

README_PICTURE = ROOT / "docs" / "graph.png"
README_WORKFLOW = "sd15_text_to_image"
HELP = ROOT / "web" / "docs" / "images"
HELP_WORKFLOWS = {
    README_WORKFLOW: "compile",
    "image_to_image": "compile_vae",
    "deepcache": "deepcache",
    "resolution_tour": "tour",
    "compare_with_stock": "compare",
}
HELP_WIDTH = 1100
# By screenshot: the picture in docs.
FIRST_STEPS = {"first-steps-3-compiling": "first-steps-compiling", "first-steps-5": "first-steps-ready"}
MOST_BYTES = 120_000


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--url", help="address of a running ComfyUI")
    source.add_argument("--first-steps", action="store_true", help="write the pictures of docs/first-steps.md")
    options = parser.parse_args(arguments)
    if options.first_steps:
        for name, picture in FIRST_STEPS.items():
            _write_jpeg(
                Image.open(ROOT / "screenshots" / f"{name}.png").convert("RGB"), ROOT / "docs" / f"{picture}.jpg"
            )
        return 0
    if problem := missing_requirement():
        print(f"error: {problem}", file=sys.stderr)
        return 2
    with front_end(options.url, pixel_ratio=1.5) as browser:
        browser.start()
        for name in HELP_WORKFLOWS:
            _save_pictures(browser, name)
    return 0


def _save_pictures(browser: FrontEnd, name: str) -> None:
    graph = workflows.ui(name)
    browser.open_template(workflows.template(name), "resolute", len(graph["nodes"]))
    if complaints := browser.complaints():
        raise RuntimeError(f"{name} does not open cleanly: {complaints}")
    is_wide = len(graph["groups"]) > 6
    picture = Image.open(io.BytesIO(browser.picture(0.6 if is_wide else 0.75))).convert("RGB")
    if name == README_WORKFLOW:
        picture.save(README_PICTURE, "PNG", optimize=True)
    picture.thumbnail((HELP_WIDTH, 10 * HELP_WIDTH), Image.Resampling.LANCZOS)
    _write_jpeg(picture, HELP / f"{HELP_WORKFLOWS[name]}.jpg")


def _write_jpeg(picture: Image.Image, path: Path) -> None:
    """Write it with the best quality of which at most MOST_BYTES result."""
    for quality in range(92, 30, -4):
        data = io.BytesIO()
        picture.save(data, "JPEG", quality=quality, optimize=True)
        if len(data.getvalue()) <= MOST_BYTES:
            break
    path.write_bytes(data.getvalue())
    print(f"{path.relative_to(ROOT)}: {len(data.getvalue()) / 1000:.0f} kB")


if __name__ == "__main__":
    sys.exit(main())
