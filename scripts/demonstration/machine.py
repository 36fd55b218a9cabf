"""What the demo asks the environment's Python, which has torch and Pillow: the device, and how much images differ.

``python -m scripts.demonstration.machine device|cpu|images`` answers with one line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import SetupError
from ..places import ROOT

Pair = tuple[Path, Path]


@dataclass(frozen=True, slots=True)
class Machine:
    """Device type and name, torch version, and which backend ``auto`` chooses here and why."""

    device: str
    name: str
    torch: str
    backend: str
    why: str


def inspect(python: Path, cpu: bool) -> Machine:
    """Inspect the machine with ``python``; ``cpu`` forces the CPU. Raises SetupError if torch does not start."""
    remedy = "Delete that environment (.venv links to it), then run this again."
    return Machine(**_ask(python, "cpu" if cpu else "device", None, f"torch does not start. {remedy}"))


def max_errors(python: Path, pairs: Sequence[Pair]) -> list[int]:
    """The largest channel difference (0 to 255) of each pair; 255 if the sizes differ. Raises SetupError."""
    names = [[str(left.resolve()), str(right.resolve())] for left, right in pairs]
    return list(_ask(python, "images", names, "The images could not be compared."))


def _ask(python: Path, what: str, given: Any, problem: str) -> Any:
    command = [str(python), "-m", "scripts.demonstration.machine", what]
    done = subprocess.run(command, cwd=ROOT, input=json.dumps(given), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SetupError(f"{problem}\n{done.stderr.strip()[-1500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _device(cpu: bool) -> dict[str, Any]:
    import torch

    from compile_cache.backends import registry

    device = "cuda" if torch.cuda.is_available() and not cpu else "cpu"
    backend, _, why = registry.resolve(registry.AUTO, device)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return asdict(Machine(device, name, str(torch.__version__), backend.name, why))


def _max_error(left: str, right: str) -> int:
    import numpy
    from PIL import Image

    a, b = (numpy.asarray(Image.open(path).convert("RGB"), dtype=numpy.int16) for path in (left, right))
    return int(abs(a - b).max()) if a.shape == b.shape else 255


def main(what: str) -> int:
    """Answer on stdout; for ``images`` the pairs are on stdin."""
    is_images = what == "images"
    answer = [_max_error(*pair) for pair in json.load(sys.stdin)] if is_images else _device(what == "cpu")
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
