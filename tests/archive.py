"""The archive that the registry ships, made as `comfy node publish` does: tracked files, less those of .comfyignore."""

from __future__ import annotations

import functools
import subprocess
import zipfile
from pathlib import Path

import pathspec  # of mypy; comfy-cli reads .comfyignore with it

ROOT = Path(__file__).resolve().parents[1]


def git(*arguments: str) -> list[str]:
    """The lines that git prints."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@functools.cache
def shipped(syntax: str = "gitignore") -> frozenset[str]:
    """The paths that the archive holds."""
    lines = [line.strip() for line in (ROOT / ".comfyignore").read_text("utf-8").splitlines()]
    ignored = pathspec.PathSpec.from_lines(syntax, [line for line in lines if line and not line.startswith("#")])
    return frozenset(path for path in git("ls-files") if not ignored.match_file(path) and (ROOT / path).is_file())


def unpack(folder: Path) -> Path:
    """Build the archive beside `folder` and unpack it there; without the modes of files, which a zip may lose."""
    archive = folder.with_suffix(".zip")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as built:
        for path in sorted(shipped()):
            built.writestr(path, (ROOT / path).read_bytes())
    with zipfile.ZipFile(archive) as built:
        built.extractall(folder)
    archive.unlink()
    return folder
