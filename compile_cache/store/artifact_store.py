"""Compiled regions on disk, shared by every process and model on the machine.

    FOLDER/<environment>/environment.json      what the artifacts in here were built for, for people and for bundles
    FOLDER/<environment>/<key>-<content>.json  manifest: what an artifact is, the size and SHA-256 of its payload
    FOLDER/<environment>/<key>-<content>.bin   payload: machine code and pickles of torch's own
    FOLDER/<environment>/<key>.lock            held by the process that builds this key

A payload is code: the folder belongs to its user alone, and nothing is read from one that others may write to. What is
damaged, or of another environment, is removed and built again; no failure in here costs more than a compile.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from .fingerprint import FORMAT_VERSION, EnvironmentFingerprint
from .private_files import make_private, unlink, write

logger = logging.getLogger(__name__)

ENVIRONMENT = "environment.json"
NAMED = 16  # characters of a digest in a file's name; the manifest has all of them
_POLL = 0.2  # seconds between two looks at whether somebody cancels
_ABANDONED = 3600.0  # age in seconds at which a half-written file is nobody's any more
_MOST_MANIFEST = 16 << 20  # bytes; one has some thousands
_MOST_NESTED = 100  # levels; one has under ten, and what walks through it uses Python's stack


class StoreError(Exception):
    """The store cannot be used at all; the message says why."""


class InvalidArtifactError(Exception):
    """One artifact that must not be loaded; the message says why."""


@dataclass(frozen=True)
class Artifact:
    """`about` is plain JSON data of whoever made it, `payload` the code."""

    key: str
    label: str
    about: Mapping[str, Any]
    payload: bytes

    @property
    def name(self) -> str:
        """Its files' name, without the ending. Two artifacts of one key differ in what they assume about sizes."""
        content = hashlib.sha256(canonical([self.key, self.about]) + self.payload).hexdigest()
        return f"{self.key[:NAMED]}-{content[:NAMED]}"


class ArtifactStore:
    """The artifacts of one environment. Safe for several processes; each method may be called from any thread."""

    def __init__(self, folder: Path, environment: EnvironmentFingerprint, limit_bytes: int) -> None:
        """Raises StoreError where the folder cannot be made or is not private."""
        self.environment = environment
        self._root = folder
        self._folder = folder / environment.digest()[:NAMED]
        self._limit = limit_bytes
        try:
            for each in (folder, self._folder):
                make_private(each)
                _demand_private(each)
            about, told = self._folder / ENVIRONMENT, canonical(asdict(environment))
            if not about.is_file() or about.read_bytes() != told:
                write(about, told)
        except OSError as error:
            raise StoreError(f"compiled code cannot be kept in {folder}: {error}") from error

    @staticmethod
    def is_new(folder: Path) -> bool:
        """Whether no environment ever kept anything there."""
        return not any(folder.glob("*/*-*.bin"))

    # --- reading -----------------------------------------------------------------------------------------------

    def load(self, key: str, known: frozenset[str] = frozenset()) -> list[Artifact]:
        """The artifacts of a key, but for those whose `name` is `known`. What is not valid is removed, and logged."""
        found = []
        for path in sorted(self._folder.glob(f"{key[:NAMED]}-*.json")):
            if path.stem in known:
                continue
            try:
                artifact = self._read(path)
            except (OSError, InvalidArtifactError) as error:
                self.discard(path.stem, str(error))
                continue
            if artifact.key == key:
                found.append(artifact)
                with contextlib.suppress(OSError):
                    os.utime(path)  # the least recently used one goes first
        return found

    def read(self, name: str) -> Artifact:
        """One artifact, left as it is. Raises InvalidArtifactError or OSError where there is none that can be used."""
        return self._read(self._folder / f"{name}.json")

    def _read(self, path: Path) -> Artifact:
        manifest = checked_manifest(parse(plain_file(path)))
        payload = plain_file(path.with_suffix(".bin"), manifest["bytes"])
        return artifact_of(path.stem, manifest, payload, self.environment)

    def discard(self, name: str, why: str) -> None:
        """Remove an artifact that cannot be used."""
        logger.warning("Resolute: the stored region %s is not used (%s); it is compiled again", name, why)
        self._remove(name)

    def names(self) -> list[str]:
        """Of all artifacts of this environment."""
        return sorted(path.stem for path in self._folder.glob("*-*.json") if path.is_file())

    def sizes(self) -> dict[str, int]:
        """Bytes of the payload of each artifact of this environment, by name."""
        return {path.stem: size for _, size, path in self._by_age() if path.parent == self._folder}

    def report(self) -> dict[str, int]:
        """How many artifacts there are for this environment, and the bytes of all environments."""
        return {"regions": len(self.names()), "bytes": sum(size for _, size, _ in self._by_age()), "limit": self._limit}

    # --- writing -----------------------------------------------------------------------------------------------

    def save(self, artifact: Artifact) -> bool:
        """Keep an artifact; where that fails (no space, say), it is logged and the answer is False."""
        try:
            # The manifest last: without one, a payload is nobody's.
            write(self._folder / f"{artifact.name}.bin", artifact.payload)
            write(self._folder / f"{artifact.name}.json", canonical(manifest_of(artifact, self.environment)))
            self._trim()
        except OSError as error:
            logger.warning("Resolute: %s was compiled and could not be kept (%s)", artifact.label, error)
            return False
        return True

    @contextlib.contextmanager
    def building(self, key: str, raise_if_cancelled: Callable[[], None], patience: float = 600.0) -> Iterator[None]:
        """Hold the right to build a key: of several processes one builds, the others wait and then find it.

        `raise_if_cancelled` is called while waiting. After `patience` seconds the caller builds without the lock.
        """
        import filelock  # comes with torch; a bundle can be looked at without either

        lock = filelock.FileLock(self._folder / f"{key[:NAMED]}.lock")
        deadline = time.monotonic() + patience
        try:
            while time.monotonic() < deadline:
                try:
                    lock.acquire(timeout=_POLL)
                    break
                except filelock.Timeout:
                    raise_if_cancelled()
                except (OSError, NotImplementedError) as error:  # a file system without locks
                    logger.debug("no lock in %s: %s", self._folder, error)
                    break
            yield
        finally:
            lock.release()

    # --- bounds ------------------------------------------------------------------------------------------------

    def _by_age(self) -> list[tuple[float, int, Path]]:
        """(last use, bytes, manifest) of every artifact of every environment, oldest first."""
        found = []
        for path in self._root.glob("*/*.json"):
            if path.name == ENVIRONMENT:
                continue
            with contextlib.suppress(OSError):
                found.append((path.stat().st_mtime, path.with_suffix(".bin").stat().st_size, path))
        return sorted(found)

    def _trim(self) -> None:
        entries = self._by_age()
        total = sum(size for _, size, _ in entries)
        for _, size, path in entries[:-1]:  # never the newest
            if total <= self._limit:
                break
            unlink(path)
            unlink(path.with_suffix(".bin"))
            total -= size
        for pattern in ("*/*.tmp", "*/*.bin"):
            for path in self._root.glob(pattern):
                with contextlib.suppress(OSError):
                    whole = path.suffix == ".bin" and path.with_suffix(".json").exists()
                    if not whole and time.time() - path.stat().st_mtime > _ABANDONED:
                        unlink(path)

    def _remove(self, name: str) -> None:
        for ending in (".json", ".bin"):
            path = self._folder / f"{name}{ending}"
            if path.is_dir() and not path.is_symlink():  # somebody's files: put aside
                with contextlib.suppress(OSError):
                    aside = tempfile.mkdtemp(dir=self._folder, prefix=f"{path.name}.", suffix=".refused")
                    path.rename(Path(aside) / path.name)
            unlink(path)


def parse(text: bytes) -> Any:
    """Plain data from JSON, nested no deeper than any code of ours can follow. Raises InvalidArtifactError."""
    with contextlib.suppress(ValueError, RecursionError):
        level = [data := json.loads(text)]
        for _ in range(_MOST_NESTED):
            inside = [each.values() if isinstance(each, dict) else each for each in level if type(each) in (dict, list)]
            level = list(chain.from_iterable(inside))
        if not level:
            return data
    raise InvalidArtifactError("its manifest is damaged")


def checked_manifest(manifest: Any) -> dict[str, Any]:
    """Raises InvalidArtifactError for what is no manifest of this version."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT_VERSION:
        version = manifest.get("format") if isinstance(manifest, dict) else None
        raise InvalidArtifactError(
            f"its format is {version!r:.40}, and this version of Resolute reads {FORMAT_VERSION}"
        )
    kinds = {"environment": str, "key": str, "label": str, "sha256": str, "bytes": int, "about": dict}
    wrong = [name for name, kind in kinds.items() if type(manifest.get(name)) is not kind]
    if wrong:
        raise InvalidArtifactError(f"its manifest lacks '{wrong[0]}'")
    return manifest


def manifest_of(artifact: Artifact, environment: EnvironmentFingerprint) -> dict[str, Any]:
    """What is known of an artifact beside its payload."""
    return {
        "format": FORMAT_VERSION,
        "environment": environment.digest(),
        "key": artifact.key,
        "label": artifact.label,
        "sha256": hashlib.sha256(artifact.payload).hexdigest(),
        "bytes": len(artifact.payload),
        "about": artifact.about,
    }


def artifact_of(
    name: str, manifest: Mapping[str, Any], payload: bytes, environment: EnvironmentFingerprint
) -> Artifact:
    """The artifact of a checked manifest and its payload.

    Raises InvalidArtifactError where they do not belong together, to this name, or to this environment.
    """
    if len(payload) != manifest["bytes"]:
        raise InvalidArtifactError(f"its payload has {len(payload)} bytes instead of {manifest['bytes']}")
    if hashlib.sha256(payload).hexdigest() != manifest["sha256"]:
        raise InvalidArtifactError("its payload is damaged")
    if manifest["environment"] != environment.digest():
        raise InvalidArtifactError("it was compiled in another environment")
    artifact = Artifact(manifest["key"], manifest["label"], manifest["about"], payload)
    try:
        is_named = artifact.name == name
    except ValueError:  # a number that is none
        is_named = False
    if not is_named:
        raise InvalidArtifactError("its name is not that of its content")
    return artifact


def plain_file(path: Path, most: int = _MOST_MANIFEST) -> bytes:
    """Its content, at most so many bytes: a link leads out of the private folder, and a pipe never ends.

    Raises InvalidArtifactError or OSError.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise InvalidArtifactError(f"{path.name} is no plain file")
    if status.st_size > most:
        raise InvalidArtifactError(f"its {path.suffix[1:]} file has {status.st_size} bytes instead of {most}")
    return path.read_bytes()


def _demand_private(folder: Path) -> None:
    """Whoever can write here can run code as this user. Raises StoreError."""
    if sys.platform == "win32":  # a profile's folders are its user's
        return
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise StoreError(f"{folder} belongs to another user, so no compiled code is read from it")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StoreError(f"{folder} is writable by others, so its code is not read: chmod 700, or set RESOLUTE_STORE")


def canonical(value: Any) -> bytes:
    """JSON, the same bytes for the same data."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
