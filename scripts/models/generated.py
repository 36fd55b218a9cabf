"""Makes checkpoints with random weights that ComfyUI's ordinary loaders accept.

``python -m scripts.models.generated KIND OUT`` writes one, in an environment with torch
and with the ComfyUI checkout named by ``--comfyui``. ``ensure`` does so once per
machine and stores the file in the models cache.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import SetupError
from ..places import ROOT, locked, models_root

# Part of the cache folder's name: increase it when the contents of the files change.
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of model: its folder in ComfyUI's ``models``, its file size, and a description."""

    folder: str
    megabytes: int
    about: str


KINDS = {
    "sd15-mini": Kind("checkpoints", 430, "SD1.5 signature, 3 short levels, CLIP-L, small VAE decoder"),
    "sd15-mini-full-vae": Kind("checkpoints", 520, "the same with the full VAE, which ComfyUI 0.8.0 needs"),
    "sdxl-mini": Kind("checkpoints", 380, "SDXL signature, 320 channels, small VAE decoder, no text encoders"),
    "sd15": Kind("checkpoints", 2130, "full SD1.5 architecture: UNet, CLIP-L, VAE"),
    "sdxl": Kind("checkpoints", 6940, "full SDXL architecture: UNet, CLIP-L, CLIP-G, VAE"),
    "sd15-mini-controlnet": Kind("controlnet", 60, "a ControlNet for sd15-mini"),
    "sdxl-controlnet": Kind("controlnet", 2500, "a ControlNet for sdxl"),
    "sd3-tiny": Kind("checkpoints", 90, "SD3, hidden size 128, 2 blocks, small VAE decoder, no text encoders"),
    "flux-tiny": Kind("diffusion_models", 2, "Flux, hidden size 128, 1 + 1 blocks, UNet only"),
    "klein-tiny": Kind("diffusion_models", 3, "Flux 2 Klein, hidden size 128, 1 + 1 blocks, UNet only"),
}


def folder() -> Path:
    """The folder for ``ComfyServer(models=...)``, in the layout of ComfyUI's ``models``."""
    return models_root() / f"v{FORMAT}"


def file_name(kind: str) -> str:
    """The file name, for example ``resolute-sd15-mini.safetensors``."""
    return f"resolute-{kind}.safetensors"


def ensure(kind: str, python: Path, comfyui: Path, say: Callable[[str], None] = print) -> Path:
    """The file of ``kind`` in the cache; ``python`` makes it if needed. Raises SetupError."""
    if kind not in KINDS:
        raise SetupError(f"There is no model kind {kind!r}; choose one of {', '.join(KINDS)}.")
    path = folder() / KINDS[kind].folder / file_name(kind)
    if path.is_file():
        return path
    with locked(path.with_suffix(".lock"), f"the model {kind}"):
        if not path.is_file():
            say(f"Model: making {kind}, {KINDS[kind].about} ({KINDS[kind].megabytes} MB, once).")
            _make(kind, path, python, comfyui)
    return path


def _make(kind: str, path: Path, python: Path, comfyui: Path) -> None:
    command = [str(python), "-m", "scripts.models.generated", kind, str(path)]
    command += ["--comfyui", str(comfyui)]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SetupError(
            f"The model {kind} could not be made:\n{(done.stderr or done.stdout).strip()[-2000:]}\n"
            f"It needs {KINDS[kind].megabytes} MB of disk in {path.parent}."
        )


def main(arguments: list[str] | None = None) -> int:
    """The command line. Writes next to OUT and renames, so that OUT is never incomplete."""
    parser = argparse.ArgumentParser(prog="python -m scripts.models.generated", description=__doc__)
    parser.add_argument("kind", choices=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--comfyui", type=Path, default=ROOT / ".comfyui")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(options.comfyui))
    from .architectures import state_dict_shapes
    from .random_weights import write

    options.out.parent.mkdir(parents=True, exist_ok=True)
    partial = options.out.with_suffix(f".{os.getpid()}.partial")
    try:
        write(partial, state_dict_shapes(options.kind), options.seed)
        os.replace(partial, options.out)
    finally:
        partial.unlink(missing_ok=True)
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
