"""Makes the thumbnails of the workflows with transformers: their nodes, because the models are too large to draw with.

``python -m scripts.pictures.family_thumbnails`` needs Pillow.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from ..workflows.build import FOLDER
from ..workflows.families import FAMILY_WORKFLOWS
from ..workflows.graph import Graph

_SIZE, _PAPER, _INK, _FAINT, _OURS, _STOCK = (640, 400), "#14191f", "#ffffff", "#9fb0bf", "#2fb3a8", "#2a333d"
_NODE, _LEFT, _TOP, _MARGIN = (176, 44), 28, 116, 10


def main() -> int:
    """The command line."""
    for build in FAMILY_WORKFLOWS:
        graph = build()
        path = FOLDER / f"{graph.template}.jpg"
        _draw(graph, path)
        print(path.name)
    return 0


def _draw(graph: Graph, path: Path) -> None:
    """The nodes of the graph as titled boxes, Resolute's in its colour."""
    picture = Image.new("RGB", _SIZE, _PAPER)
    draw = ImageDraw.Draw(picture)
    title = str(graph.nodes[-1].values["text"]).partition("\n")[0].removeprefix("## ")
    draw.text((_LEFT, 20), title, fill=_INK, font=ImageFont.load_default(34))
    draw.text((_LEFT, 66), "ComfyUI's template with two nodes added", fill=_FAINT, font=ImageFont.load_default(21))
    for number, node in enumerate(graph.nodes[:-1]):
        left, top = _LEFT + number % 3 * (_NODE[0] + 24), _TOP + number // 3 * (_NODE[1] + 12)
        box = (left, top, left + _NODE[0], top + _NODE[1])
        draw.rounded_rectangle(box, 8, fill=_OURS if node.type.is_ours else _STOCK)
        at, font = (left + _MARGIN, top + _NODE[1] // 2), _fitting(node.title, _NODE[0] - 2 * _MARGIN)
        draw.text(at, node.title, fill=_INK, font=font, anchor="lm")
    picture.save(path, "JPEG", quality=88, optimize=True)


def _fitting(text: str, width: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The largest font of at most 14 pixels in which the text is no wider than this."""
    fonts = (ImageFont.load_default(size) for size in range(14, 7, -1))
    return next((font for font in fonts if font.getlength(text) <= width), ImageFont.load_default(7))


if __name__ == "__main__":
    sys.exit(main())
