"""Compares images: the largest difference of any channel, 0 to 255.

Pillow and numpy are in the environment, but the demo may run on a plain Python, so
``max_errors`` compares all pairs in one process of that environment.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import SetupError
from ..places import ROOT

Pair = tuple[Path, Path]


def max_errors(python: Path, pairs: Sequence[Pair]) -> list[int]:
    """The largest channel difference (0 to 255) of each pair; 255 if the sizes differ. Raises SetupError."""
    done = subprocess.run(
        [str(python), "-m", "scripts.demonstration.images"],
        cwd=ROOT,
        input=json.dumps([[str(left.resolve()), str(right.resolve())] for left, right in pairs]),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SetupError(f"The images could not be compared:\n{done.stderr.strip()[-1000:]}")
    return [int(error) for error in json.loads(done.stdout)]


def _max_error(left: str, right: str) -> int:
    import numpy
    from PIL import Image

    a, b = (numpy.asarray(Image.open(path).convert("RGB"), dtype=numpy.int16) for path in (left, right))
    return int(abs(a - b).max()) if a.shape == b.shape else 255


if __name__ == "__main__":
    print(json.dumps([_max_error(left, right) for left, right in json.load(sys.stdin)]))
