"""Prepare `benchmarks.smoke` before its clock starts: make the models, import a bundle's regions."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from scripts.places import ROOT
from scripts.server.process import CPU_ARGUMENTS, ComfyServer
from scripts.setup import command

from . import workloads
from .smoke_rows import FORMS


def make_models(setup: command.Setup, models: Path, is_small: bool) -> dict[str, str]:
    """Make the missing files of SDXL, its LoRA, and Flux in both formats. Returns the file names for prompts."""
    from .random_lora import write_lora

    names = ["sdxl", *(f"flux:{form}" if form else "flux" for form in FORMS.values())]
    checkpoint = workloads.make(setup, models, names, is_small)["sdxl"]
    lora = models / "loras" / f"smoke-{checkpoint}"
    write_lora(models / "checkpoints" / checkpoint, lora, 0)
    return {"checkpoint": checkpoint, "lora": lora.name}


def import_bundle(file: Path, server: ComfyServer, store: Path) -> dict[str, Any]:
    """Import a bundle into a store with the user's command `scripts/bundle`, for a server like this one. The command
    refuses a bundle of other code; the run is then cold.
    """
    given = [*(CPU_ARGUMENTS if server.cpu else ()), *server.arguments, "--base-directory", str(server.folder)]
    arguments = ["import", str(file), "--yes", "--comfyui", str(server.comfyui), "--store", str(store), "--", *given]
    done = subprocess.run(
        [str(server.python), str(ROOT / "scripts" / "bundle"), *arguments],
        env=server._environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = (done.stdout if done.returncode == 0 else done.stderr).strip()
    print(said, flush=True)
    about = {"imported": done.returncode == 0, "imported_bytes": file.stat().st_size}
    return about | {"said": said.splitlines()[-1] if said else ""}
