"""Make what `benchmarks.smoke` needs before its clock starts: models, a bundle's regions, the commit of the code."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

from scripts.models import generated
from scripts.places import ROOT
from scripts.server.process import CPU_ARGUMENTS, ComfyServer, link
from scripts.setup import command


def make_models(setup: command.Setup, models: Path, is_small: bool) -> dict[str, str]:
    """Make what is missing of SDXL, its LoRA, and Flux in both formats. Returns the files' names that prompts need."""
    from .random_lora import write_lora

    for name in ("checkpoints", "diffusion_models", "loras"):
        (models / name).mkdir(parents=True, exist_ok=True)
    made = generated.ensure("sd15-mini" if is_small else "sdxl", setup.python, setup.comfyui)
    link(made, models / "checkpoints" / made.name)
    lora = models / "loras" / f"smoke-{made.name}"
    if not lora.is_file():
        write_lora(made, lora, 0)
    child = [str(setup.python), "-m", "benchmarks.smoke", "--make", str(models), str(setup.comfyui)]
    subprocess.run([*child, *(["--cpu"] if is_small else [])], cwd=ROOT, check=True)
    return {"checkpoint": made.name, "lora": lora.name}


def import_bundle(file: Path, server: ComfyServer, store: Path) -> dict[str, Any]:
    """Import a bundle into a store with the command of people, for a server like this one. The command refuses a bundle
    of other code; then the run is cold.
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


def commit_of(folder: Path, given: str | None) -> dict[str, Any]:
    """The commit of a checkout, and whether files differ from it. given: what the caller knows; it comes first."""

    def git(*arguments: str) -> str | None:
        if shutil.which("git") is None:
            return None
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)  # noqa: S607
        return done.stdout.strip() if done.returncode == 0 else None

    top = git("rev-parse", "--show-toplevel")
    is_own = top is not None and Path(top).resolve() == folder.resolve()  # and not a repository around it
    found, changes = (git("rev-parse", "HEAD"), git("status", "--porcelain")) if is_own else (None, None)
    dirty = None if changes is None or (given and given != found) else bool(changes)
    return {"commit": given or found or "unknown", "is_dirty": dirty}
