"""Files of the ingress: those that replicas sent, and what clients upload for all replicas."""

from __future__ import annotations

import hashlib
import mimetypes
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

TYPES = ("input", "output", "temp")
_LONGEST = 255  # bytes of a name, for the usual file systems
# A browser shows these and runs no script in them. All others go as plain bytes: pages, any XML, a saved mail.
_SHOWN = ("image/", "video/", "audio/", "text/plain", "application/json", "model/")


class RefusedError(ValueError):
    """A name that leads out of its folder, or an unknown folder."""


class Files:
    """The folders `input`, `output` and `temp` below the fleet's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, kind: str, subfolder: str, name: str) -> Path:
        """Where a file is. Raises RefusedError if the name leads elsewhere."""
        if kind not in TYPES:
            raise RefusedError(f"There is no folder {kind!r}.")
        whole = f"{subfolder}/{name}".encode("utf-8", "replace")
        if not name or b"\0" in whole or max(map(len, whole.split(b"/"))) > _LONGEST:
            raise RefusedError(f"A name needs 1 to {_LONGEST} bytes in each of its parts, and no NUL.")
        folder = (self._folder / kind).resolve()
        path = (folder / subfolder / name).resolve()
        if not path.is_relative_to(folder) or path == folder:
            raise RefusedError("The name leads out of its folder.")
        return path

    def empty(self, kind: str) -> None:
        """Remove everything in a folder. What cannot be removed stays."""
        shutil.rmtree(self._folder / kind, ignore_errors=True)

    def receive(self, place: Mapping[str, str], content: bytes, is_first: bool, is_last: bool) -> None:
        """Add a part of a file from a replica. It has its name only when it is whole. Raises OSError, RefusedError."""
        path = self.path(place["type"], place.get("subfolder", ""), place["filename"])
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        with open(partial, "wb" if is_first else "ab") as file:
            file.write(content)
        if is_last:
            os.replace(partial, path)

    def upload(self, kind: str, subfolder: str, name: str, content: bytes, overwrite: bool) -> str:
        """Keep an upload as ComfyUI does, and return its name: "a (1).png" if another "a.png" is there."""
        path = self.path(kind, subfolder, Path(name).name)
        path.parent.mkdir(parents=True, exist_ok=True)
        stem, suffix, number = path.stem, path.suffix, 1
        while path.exists() and not overwrite and not _same(path, content):
            path = path.with_name(f"{stem} ({number}){suffix}")
            number += 1
        path.write_bytes(content)
        return path.name

    def image_size(self, name: str) -> tuple[int, int] | None:
        """Width and height of an uploaded picture; None if LoadImage may give another size."""
        from PIL import Image  # with requirements/fleet.txt

        try:
            with Image.open(self.path("input", "", name.removesuffix(" [input]"))) as image:
                upright = image.getexif().get(0x0112, 1) == 1  # EXIF's orientation
                return image.size if upright and getattr(image, "n_frames", 1) == 1 else None
        except Exception:  # noqa: BLE001 - Pillow raises many kinds; LoadImage will report the file
            return None


def content_type(path: Path) -> str:
    """For the answer of /view."""
    guessed = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return guessed if guessed.startswith(_SHOWN) and "xml" not in guessed else "application/octet-stream"


def _same(path: Path, content: bytes) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(content).digest()
