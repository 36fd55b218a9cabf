"""Makes the thumbnails of the bundled workflows: what each is for, with pictures that the demo's model draws.

``python -m scripts.pictures.thumbnails --url http://127.0.0.1:8188`` needs a running ComfyUI with the pack and
with ``scripts/models/demo_model`` as a pack, and Pillow. The times are those of docs/measured.md. Without ``--url`` it
draws those of the workflows with transformers only: their nodes, because the models are too large to draw with.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image, ImageDraw, ImageFilter, ImageFont, ImageOps

from ..demonstration.plan import COMPARE, DEEPCACHE, IMAGE_TO_IMAGE, SD15, TOUR_NAME, Job, prompt_for
from ..server.client import Client
from ..workflows.build import FOLDER
from ..workflows.families import FAMILY_WORKFLOWS
from ..workflows.graph import TEMPLATE_PREFIX, Graph
from .jpeg import smallest_loss

SIZE = (640, 400)
MOST_BYTES = 40_000
_PAPER, _INK, _FAINT, _OURS, _STOCK = "#14191f", "#ffffff", "#9fb0bf", "#2fb3a8", "#6b7785"
_NUMBERS = {2: "two", 3: "three"}
# Columns, width and height of a node, and the gap between columns; there is room for 280 pixels of rows.
_GRIDS = ((3, 176, 44, 24), (4, 134, 44, 16), (5, 104, 24, 16))
_BOX = "#2a333d"  # of a node of ComfyUI's
_TOUR = ((256, 192), (224, 192), (192, 192), (160, 240), (184, 136))
_LCM = ((192, 192), (96, 256), (256, 96))
# Seconds of a prompt of SDXL, 20 steps at 1024x1024, on an H200.
_SDXL = (("ComfyUI", 3.18, _STOCK), ("Resolute", 1.10, _OURS))

Picture = Any
Drawer = Callable[[Job], list[Picture]]


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="address of a running ComfyUI")
    url = parser.parse_args(arguments).url
    for build in FAMILY_WORKFLOWS:
        graph = build()
        quality = 88 if len(graph.nodes) < 20 else 70  # of many small texts, to keep the file small
        _nodes(graph).save(FOLDER / f"{graph.template}.jpg", "JPEG", quality=quality, optimize=True)
        print(graph.template)
    return _draw_with(Client(url)) if url else 0


def _draw_with(client: Client) -> int:
    """Draw the thumbnails that need a server."""

    def draw(job: Job) -> list[Picture]:
        history = client.run(prompt_for(job, None, "eager", 3, 20))
        return [Image.open(io.BytesIO(data)).convert("RGB") for data in client.images(history)]

    for name, make in _THUMBNAILS.items():
        path = FOLDER / f"{TEMPLATE_PREFIX}{name}.jpg"
        path.write_bytes(smallest_loss(make(draw), MOST_BYTES))
        print(path.name)
    return 0


def _canvas(title: str, about: str) -> Picture:
    picture = Image.new("RGB", SIZE, _PAPER)
    draw = ImageDraw.Draw(picture)
    draw.text((28, 20), title, fill=_INK, font=ImageFont.load_default(34))
    draw.text((28, 66), about, fill=_FAINT, font=ImageFont.load_default(21))
    return picture


def _paste(canvas: Picture, picture: Picture, box: tuple[int, int, int, int], label: str = "") -> None:
    """Put a picture into a box (left, top, right, bottom), as large as fits, with a label below it."""
    fitted = ImageOps.contain(picture, (box[2] - box[0], box[3] - box[1]), Image.Resampling.LANCZOS)
    left = box[0] + (box[2] - box[0] - fitted.width) // 2
    top = box[1] + (box[3] - box[1] - fitted.height) // 2
    canvas.paste(fitted, (left, top))
    if label:
        middle = (box[0] + (box[2] - box[0]) // 2, box[3] + 18)
        ImageDraw.Draw(canvas).text(middle, label, fill=_INK, font=ImageFont.load_default(19), anchor="mm")


def _row(canvas: Picture, pictures: Sequence[tuple[Picture, str]]) -> Picture:
    """Pictures side by side below the title."""
    width = (SIZE[0] - 56 - 16 * (len(pictures) - 1)) // len(pictures)
    for index, (picture, label) in enumerate(pictures):
        left = 28 + index * (width + 16)
        _paste(canvas, picture, (left, 108, left + width, 352), label)
    return canvas


def _bars(canvas: Picture, rows: Sequence[tuple[str, float, str]], unit: str) -> Picture:
    draw = ImageDraw.Draw(canvas)
    most = max(value for _, value, _ in rows)
    for index, (name, value, color) in enumerate(rows):
        top = 150 + index * 92
        draw.text((310, top), name, fill=_FAINT, font=ImageFont.load_default(21))
        draw.rectangle((310, top + 30, 310 + int(210 * value / most), top + 62), fill=color)
        at = (320 + int(210 * value / most), top + 30)
        draw.text(at, f"{value:.2f} {unit}", fill=_INK, font=ImageFont.load_default(24))
    return canvas


def _nodes(graph: Graph) -> Picture:
    """The nodes of the graph as titled boxes, Resolute's in its colour."""
    title = str(graph.nodes[-1].values["text"]).partition("\n")[0].removeprefix("## ")
    compiling = sum(node.type.id.startswith("ResoluteCompile") for node in graph.nodes)
    picture = _canvas(title, f"ComfyUI's template with {_NUMBERS[compiling]} nodes added")
    draw = ImageDraw.Draw(picture)
    nodes = graph.nodes[:-1]
    columns, width, height, gap = next(grid for grid in _GRIDS if grid[0] * (280 // (grid[2] + 12)) >= len(nodes))
    for number, node in enumerate(nodes):
        left, top = 28 + number % columns * (width + gap), 116 + number // columns * (height + 12)
        box = (left, top, left + width, top + height)
        draw.rounded_rectangle(box, 8, fill=_OURS if node.type.is_ours else _BOX)
        at, font = (left + 10, top + height // 2), _fitting(node.title, width - 2 * 10)
        draw.text(at, node.title, fill=_INK, font=font, anchor="lm")
    return picture


def _fitting(text: str, width: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The largest font of at most 14 pixels in which the text is no wider than this."""
    fonts = (ImageFont.load_default(size) for size in range(14, 7, -1))
    return next((font for font in fonts if font.getlength(text) <= width), ImageFont.load_default(7))


def _sd15(draw: Drawer) -> Picture:
    (picture,) = draw(Job(SD15, ((256, 256),), tokens=12))
    canvas = _canvas("SD1.5, compiled", "any size, one compile")
    _paste(canvas, picture, (28, 112, 288, 372))
    draw_on = ImageDraw.Draw(canvas)
    lines = ("first prompt: compiles", *(f"{each}: nothing compiles" for each in ("new size", "new text", "LoRA")))
    for index, line in enumerate(lines):
        draw_on.text((310, 140 + 52 * index), line, fill=_INK if index else _OURS, font=ImageFont.load_default(24))
    return canvas


def _sdxl(draw: Drawer) -> Picture:
    (picture,) = draw(Job(SD15, ((264, 256),), tokens=12))
    canvas = _canvas("SDXL, compiled", "1024x1024, 20 steps on an H200")
    _paste(canvas, picture, (28, 112, 288, 372))
    return _bars(canvas, _SDXL, "s")


def _oneflow(draw: Drawer) -> Picture:
    (picture,) = draw(Job(SD15, ((272, 256),), tokens=12))
    canvas = _canvas("SD1.5 with OneFlow", "one graph for each size; Python 3.10")
    _row(canvas, [(picture, "OneFlow graph")])
    return canvas


def _tour(draw: Drawer) -> Picture:
    pictures = draw(Job(TOUR_NAME, _TOUR, tokens=12))
    labels = ["compiles", *["no compile"] * 4]
    canvas = _canvas("One model, five sizes", "only the first size compiles")
    return _row(canvas, list(zip(pictures[:5], labels, strict=True)))


def _image_to_image(draw: Drawer) -> Picture:
    before = draw(Job(SD15, ((256, 256),), tokens=12))[0]
    after = draw(Job(SD15, ((280, 256),), tokens=12))[0]
    canvas = _canvas("Image to image, compiled", "scaled, encoded, drawn anew")
    return _row(canvas, [(before, "before"), (after, "after")])


def _compare(draw: Drawer) -> Picture:
    pictures = draw(Job(COMPARE, ((256, 256),), tokens=12))
    labels = ("compiled", "ComfyUI", "difference")
    canvas = _canvas("Compiled against ComfyUI", "same seed, largest and mean error, PSNR, SSIM")
    return _row(canvas, list(zip(pictures[:3], labels, strict=False)))


def _deepcache(draw: Drawer) -> Picture:
    whole = draw(Job(SD15, ((264, 200),), tokens=12))[0]
    fast = draw(Job(DEEPCACHE, ((264, 200),), tokens=12))[0]
    canvas = _canvas("DeepCache", "20 steps: 7 full, 13 fast")
    return _row(canvas, [(whole, "every step full"), (fast, "DeepCache")])


def _controlnet(draw: Drawer) -> Picture:
    picture = draw(Job(SD15, ((320, 240),), tokens=12))[0]
    edges = picture.convert("L").filter(ImageFilter.FIND_EDGES).point(lambda value: 255 if value > 40 else 0)
    canvas = _canvas("DeepCache with a ControlNet", "edges of a picture, drawn anew")
    return _row(canvas, [(edges.convert("RGB"), "edges"), (picture, "result")])


def _lcm(draw: Drawer) -> Picture:
    pictures = [draw(Job(SD15, (size,), tokens=12))[0] for size in _LCM]
    canvas = _canvas("SDXL with LCM, three shapes", "6 steps; only the first shape compiles")
    return _row(canvas, list(zip(pictures, ("1024x1024", "512x2048", "2048x512"), strict=True)))


_THUMBNAILS: dict[str, Callable[[Drawer], Picture]] = {
    SD15: _sd15,
    "sdxl_text_to_image": _sdxl,
    "oneflow_text_to_image": _oneflow,
    TOUR_NAME: _tour,
    IMAGE_TO_IMAGE: _image_to_image,
    COMPARE: _compare,
    DEEPCACHE: _deepcache,
    "deepcache_controlnet": _controlnet,
    "lcm_image_to_image": _lcm,
}


if __name__ == "__main__":
    sys.exit(main())
