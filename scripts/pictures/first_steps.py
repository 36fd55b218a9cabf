"""Makes the pictures of docs/first-steps.md from the screenshots of its browser test.

``scripts/test --browser --long -- -k first_steps`` puts them into ``screenshots``; then
``python -m scripts.pictures.first_steps`` writes the pictures. Needs Pillow.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from PIL import Image

from ..places import ROOT
from .jpeg import smallest_loss

# By screenshot: the picture in docs.
PICTURES = {"first-steps-3-compiling": "first-steps-compiling", "first-steps-5": "first-steps-ready"}
MOST_BYTES = 120_000


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--screenshots", type=Path, default=ROOT / "screenshots", help="where the test put them")
    folder = parser.parse_args(arguments).screenshots
    for name, picture in PICTURES.items():
        path = ROOT / "docs" / f"{picture}.jpg"
        path.write_bytes(smallest_loss(Image.open(folder / f"{name}.png").convert("RGB"), MOST_BYTES))
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
