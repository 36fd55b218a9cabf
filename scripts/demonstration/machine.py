"""Inspects the device that the demo will run on, in the environment that ComfyUI will use.

``python -m scripts.demonstration.machine [--cpu]`` prints it as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import SetupError
from ..places import ROOT


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
    command = [str(python), "-m", "scripts.demonstration.machine", *(["--cpu"] if cpu else [])]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SetupError(
            f"torch does not start in the environment:\n{done.stderr.strip()[-1500:]}\n"
            "Delete that environment (.venv links to it), then run this again."
        )
    return Machine(**json.loads(done.stdout.splitlines()[-1]))


def main(arguments: list[str]) -> int:
    """The command line."""
    import torch

    from compile_cache.backends import registry

    device = "cuda" if torch.cuda.is_available() and "--cpu" not in arguments else "cpu"
    backend, _, why = registry.resolve(registry.AUTO, device)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(json.dumps(asdict(Machine(device, name, str(torch.__version__), backend.name, why))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
