"""Compiled regions on disk, shared by every process and model on the machine.

    FOLDER/<environment>/environment.json      what the artifacts in here were built for, for people and for bundles
    FOLDER/<environment>/<key>-<content>.json  manifest: what an artifact is, the size and SHA-256 of its payload
    FOLDER/<environment>/<key>-<content>.bin   payload: machine code and pickles of torch's own
    FOLDER/<environment>/<key>.lock            held by the process that builds this key

A payload is code: the folder belongs to its user alone, and nothing is read from one that others may write to. An
artifact that is damaged or not understood is removed and built again; no failure in here costs more than a compile.
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
from pathlib import Path
from typing import Any

import filelock

from .fingerprint import FORMAT_VERSION, EnvironmentFingerprint

logger = logging.getLogger(__name__)

_ENVIRONMENT = "environment.json"
_NAMED = 16  # characters of a digest in a file's name; the manifest has all of them
_POLL = 0.2  # seconds between two looks at whether somebody cancels
_ABANDONED = 3600.0  # age in seconds at which a half-written file is nobody's any more


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
        content = hashlib.sha256(_canonical(self.about) + self.payload).hexdigest()
        return f"{self.key[:_NAMED]}-{content[:_NAMED]}"


class ArtifactStore:
    """The artifacts of one environment. Safe for several processes; each method may be called from any thread."""

    def __init__(self, folder: Path, environment: EnvironmentFingerprint, limit_bytes: int) -> None:
        """Raises StoreError where the folder cannot be made or is not private."""
        self.environment = environment
        self._root = folder
        self._folder = folder / environment.digest()[:_NAMED]
        self._limit = limit_bytes
        try:
            for each in (folder, self._folder):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
                _demand_private(each)
            about = self._folder / _ENVIRONMENT
            if not about.is_file():
                _write(about, _canonical(asdict(environment)))
        except OSError as error:
            raise StoreError(f"compiled code cannot be kept in {folder}: {error}") from error

    # --- reading -----------------------------------------------------------------------------------------------

    def load(self, key: str, known: frozenset[str] = frozenset()) -> list[Artifact]:
        """The artifacts of a key, but for those whose `name` is `known`. What is not valid is removed, and logged."""
        found = []
        for path in sorted(self._folder.glob(f"{key[:_NAMED]}-*.json")):
            if path.stem in known:
                continue
            try:
                artifact = self._read(path)
            except (OSError, InvalidArtifactError) as error:
                self.discard(path.stem, str(error))
                continue
            if artifact.key == key:
                found.append(artifact)
        return found

    def _read(self, path: Path) -> Artifact:
        manifest = read_manifest(path.read_bytes())
        payload = path.with_suffix(".bin").read_bytes()
        check_payload(manifest, payload)
        with contextlib.suppress(OSError):
            os.utime(path)  # the least recently used one goes first
        return Artifact(manifest["key"], manifest["label"], manifest["about"], payload)

    def discard(self, name: str, why: str) -> None:
        """Remove an artifact that cannot be used."""
        logger.warning("Resolute: the stored region %s is not used (%s); it is compiled again", name, why)
        self._remove(name)

    def names(self) -> list[str]:
        """Of all artifacts of this environment."""
        return sorted(path.stem for path in self._folder.glob("*.json") if path.name != _ENVIRONMENT)

    def report(self) -> dict[str, int]:
        """How many artifacts there are for this environment, and the bytes of all environments."""
        return {"regions": len(self.names()), "bytes": sum(size for _, size, _ in self._by_age()), "limit": self._limit}

    # --- writing -----------------------------------------------------------------------------------------------

    def save(self, artifact: Artifact) -> None:
        """Keep an artifact; where that fails (no space, say), it is logged and nothing else happens."""
        manifest = {
            "format": FORMAT_VERSION,
            "key": artifact.key,
            "label": artifact.label,
            "sha256": hashlib.sha256(artifact.payload).hexdigest(),
            "bytes": len(artifact.payload),
            "about": artifact.about,
        }
        try:
            # The manifest last: without one, a payload is nobody's.
            _write(self._folder / f"{artifact.name}.bin", artifact.payload)
            _write(self._folder / f"{artifact.name}.json", _canonical(manifest))
            self._trim()
        except OSError as error:
            logger.warning("Resolute: %s was compiled and could not be kept (%s)", artifact.label, error)

    @contextlib.contextmanager
    def building(self, key: str, checkpoint: Callable[[], None], patience: float = 600.0) -> Iterator[None]:
        """Hold the right to build a key: of several processes one builds, the others wait and then find it.

        `checkpoint` is called while waiting and may raise to cancel. After `patience` seconds it goes on without.
        """
        lock = filelock.FileLock(self._folder / f"{key[:_NAMED]}.lock")
        deadline = time.monotonic() + patience
        try:
            while time.monotonic() < deadline:
                try:
                    lock.acquire(timeout=_POLL)
                    break
                except filelock.Timeout:
                    checkpoint()
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
            if path.name == _ENVIRONMENT:
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
            _unlink(path)
            _unlink(path.with_suffix(".bin"))
            total -= size
        for pattern in ("*/*.tmp", "*/*.bin"):
            for path in self._root.glob(pattern):
                with contextlib.suppress(OSError):
                    whole = path.suffix == ".bin" and path.with_suffix(".json").exists()
                    if not whole and time.time() - path.stat().st_mtime > _ABANDONED:
                        _unlink(path)

    def _remove(self, name: str) -> None:
        for ending in (".json", ".bin"):
            _unlink(self._folder / f"{name}{ending}")


def read_manifest(text: bytes) -> dict[str, Any]:
    """Raises InvalidArtifactError for what is no manifest of this version."""
    try:
        manifest = json.loads(text)
    except ValueError:
        raise InvalidArtifactError("its manifest is damaged") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT_VERSION:
        version = manifest.get("format") if isinstance(manifest, dict) else None
        raise InvalidArtifactError(f"its format is {version}, and this version of Resolute reads {FORMAT_VERSION}")
    kinds = {"key": str, "label": str, "sha256": str, "bytes": int, "about": dict}
    wrong = [name for name, kind in kinds.items() if not isinstance(manifest.get(name), kind)]
    if wrong:
        raise InvalidArtifactError(f"its manifest lacks '{wrong[0]}'")
    return manifest


def check_payload(manifest: Mapping[str, Any], payload: bytes) -> None:
    """Raises InvalidArtifactError where the payload is not the one that the manifest was written for."""
    if len(payload) != manifest["bytes"]:
        raise InvalidArtifactError(f"its payload has {len(payload)} bytes instead of {manifest['bytes']}")
    if hashlib.sha256(payload).hexdigest() != manifest["sha256"]:
        raise InvalidArtifactError("its payload is damaged")


def _demand_private(folder: Path) -> None:
    """Whoever can write here can run code as this user. Raises StoreError."""
    if sys.platform == "win32":  # a profile's folders are its user's
        return
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise StoreError(f"{folder} belongs to another user, so no compiled code is read from it")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StoreError(f"{folder} can be written by others, so no compiled code is read from it: chmod 700 it")


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _write(path: Path, content: bytes) -> None:
    """All of it or nothing, also when the power goes."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        _unlink(Path(temporary))
        raise


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
