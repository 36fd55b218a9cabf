"""Compiled regions on disk, shared by every process and model on the machine.

    FOLDER/<environment>/environment.json        the environment, in readable form; bundles use it too
    FOLDER/<environment>/<key>-<content>.region  a line of JSON (environment, key, label, about) and then the payload:
                                                 machine code and torch's own pickles
    FOLDER/<environment>/<key>.lock              held by the process that compiles this key

A payload is executable code, so the store refuses a folder that other users can write to or replace, and a file of
another user. An artifact is removed if its bytes prove that it is damaged or from another environment. If it merely
cannot be read or loaded, it is kept for the next process. An error in the store never costs more than a compile.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .codec import MAX_BYTES, canonical_json, decoded, parse_json, read_regular_file
from .codec import InvalidArtifactError as InvalidArtifactError
from .fingerprint import EnvironmentFingerprint
from .private_files import NotPrivateError, files_in, make_private, require_private, try_unlink, write_file

logger = logging.getLogger(__name__)

ENVIRONMENT_FILE = "environment.json"
DIGEST_CHARS = 16  # characters of a digest in a file name
ENDING = ".region"
_SKEW_SECONDS = 60.0  # by which the clock of another process or machine may be ahead
_ABANDONED_SECONDS = 3600.0  # a half-written file of this age has lost its writer


class StoreError(Exception):
    """The store cannot be used; the message says why."""


@dataclass(frozen=True)
class Artifact:
    """One compiled region. `about`: JSON data of the backend that compiled it; `payload`: the code."""

    key: str
    label: str
    about: Mapping[str, Any]
    payload: bytes

    @property
    def name(self) -> str:
        """File name without the ending. Two artifacts of one key differ in their assumptions about sizes."""
        content = hashlib.sha256(canonical_json([self.key, self.about]) + self.payload).hexdigest()
        return f"{self.key[:DIGEST_CHARS]}-{content[:DIGEST_CHARS]}"


@dataclass(frozen=True)
class _Header:
    """The first line of a file: an artifact without its payload. environment: its digest, which covers the format."""

    environment: str
    key: str
    label: str
    about: Mapping[str, Any]


class ArtifactStore:
    """The artifacts of one environment. Safe for several processes and threads."""

    def __init__(
        self, folder: Path, environment: EnvironmentFingerprint, limit_bytes: int, application: str = ""
    ) -> None:
        """Make the folder. Raises StoreError if that fails, or if other users can write to it or replace it.

        application: see `CacheConfig`. Code that no call of it compared is compared before its first use.
        """
        self.environment, self.application = environment, application
        self._root = folder
        self._folder = folder / environment.digest()[:DIGEST_CHARS]
        self._limit = limit_bytes
        self._unusable: set[str] = set()  # names of artifacts that this process could not read or load
        try:
            self._prepare()
        except NotPrivateError as error:
            raise StoreError(f"compiled code cannot be kept: {error}") from error
        except OSError as error:
            raise StoreError(f"compiled code cannot be kept in {folder}: {error}; set RESOLUTE_STORE") from error

    def _prepare(self) -> None:
        """Make the folders and check who may write to them, before each lock, read and write: users delete and
        replace them while ComfyUI runs. Raises OSError, also if they are not private.
        """
        for each in (self._root, self._folder):
            make_private(each)
            require_private(each)
        path, content = self._folder / ENVIRONMENT_FILE, canonical_json(asdict(self.environment))
        if not path.is_file() or path.read_bytes() != content:
            write_file(path, content)

    @staticmethod
    def is_new(folder: Path) -> bool:
        """True if `folder` has no artifacts of any environment."""
        return not any(folder.glob(f"*/*{ENDING}"))

    # --- reading -----------------------------------------------------------------------------------------------

    def load(self, key: str, known: frozenset[str] = frozenset()) -> list[Artifact]:
        """Return the artifacts of a key, except those named in `known` and those that could not be loaded before.
        Invalid ones are removed and logged. Raises OSError if the folder cannot be used.
        """
        self._prepare()
        found = []
        for path in files_in(self._folder, f"{key[:DIGEST_CHARS]}-*{ENDING}"):
            if path.stem in known or path.stem in self._unusable:
                continue
            try:
                artifact = self.read(path.stem)
            except InvalidArtifactError as error:
                self.discard(path.stem, str(error))
                continue
            except OSError as error:  # the bytes may be valid
                self.leave(path.stem, str(error))
                continue
            if artifact.key == key:
                found.append(artifact)
                with contextlib.suppress(OSError):
                    os.utime(path)  # `_trim` removes the least recently used one first
        return found

    def read(self, name: str) -> Artifact:
        """Read one artifact without changing it. Raises InvalidArtifactError, or OSError if it cannot be read."""
        return artifact_of(name, read_regular_file(self._path(name), sys.maxsize), self.environment)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{ENDING}"

    def discard(self, name: str, why: str) -> None:
        """Remove an invalid artifact and log `why`."""
        logger.warning("Resolute: the stored region %s is invalid (%s); it will be compiled again", name, why)
        self.remove(name)

    def leave(self, name: str, why: str) -> None:
        """Stop using an artifact that this process cannot read or load, and log `why`. The file is kept."""
        logger.warning("Resolute: the stored region %s cannot be used now (%s); it is compiled, and stays", name, why)
        self._unusable.add(name)

    def names(self) -> list[str]:
        """Return the names of all artifacts of this environment."""
        return [path.stem for path in files_in(self._folder, f"*{ENDING}") if path.is_file()]

    def sizes(self) -> dict[str, int]:
        """Return the bytes on disk of each artifact of this environment, by name."""
        return {path.stem: size for _, size, path in self._by_age() if path.parent == self._folder}

    def report(self) -> dict[str, int]:
        """Return the number of this environment's artifacts (`regions`), all environments' `bytes`, and the `limit`."""
        return {"regions": len(self.names()), "bytes": sum(size for _, size, _ in self._by_age()), "limit": self._limit}

    # --- writing -----------------------------------------------------------------------------------------------

    def save(self, artifact: Artifact) -> bool:
        """Store an artifact. Returns False, and logs why, if that fails, for example on a full disk."""
        try:
            self._prepare()
            write_file(self._path(artifact.name), content_of(artifact, self.environment))
            self._trim(artifact.name)
        except OSError as error:
            logger.warning("Resolute: %s was compiled but could not be stored (%s)", artifact.label, error)
            return False
        return True

    def build_lock(self, key: str) -> Any:
        """Lock a key while it is compiled, so that only one of several processes compiles it. Does not wait.

        Returns a lock with `release()`; None if another process has it. The system releases it with its process.
        """
        import filelock  # a dependency of torch; inspecting a bundle needs neither, so import it here

        # Not thread-local: the thread that compiles acquires it, and a call that waits may release it.
        lock = filelock.FileLock(self._folder / f"{key[:DIGEST_CHARS]}.lock", thread_local=False)
        try:
            self._prepare()  # else filelock makes the folder, with the umask's mode
            lock.acquire(blocking=False)
        except filelock.Timeout:
            return None
        except Exception as error:  # noqa: BLE001 (a file system without locks raises several classes)
            logger.debug("Resolute: no lock in %s: %s", self._folder, error)
        return lock

    # --- bounds ------------------------------------------------------------------------------------------------

    def _by_age(self) -> list[tuple[float, int, Path]]:
        """Return (time of last use, bytes, path) of every artifact of every environment, oldest first."""
        found = []
        for path in files_in(self._root, f"*/*-*{ENDING}"):
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        return sorted(found)

    def _trim(self, newest: str) -> None:
        """Remove the least recently used artifacts beyond the limit, but never `newest`. An artifact with a later time
        than `newest` dates from before the clock was set back, so it is older than all others.
        """
        entries = self._by_age()
        total = sum(size for _, size, _ in entries)
        latest = next((used for used, _, path in entries if path.stem == newest), time.time()) + _SKEW_SECONDS
        entries.sort(key=lambda entry: entry[0] <= latest)
        for _, size, path in entries:
            if total <= self._limit:
                break
            if path.stem == newest:
                continue
            try_unlink(path)
            total -= size
        for path in files_in(self._root, "*/*.tmp"):
            with contextlib.suppress(OSError):
                # A time in the future dates from before the clock was set back.
                if abs(time.time() - path.stat().st_mtime) > _ABANDONED_SECONDS:
                    try_unlink(path)

    def remove(self, name: str) -> None:
        path = self._path(name)
        if path.is_dir() and not path.is_symlink():  # a user's folder: move it aside instead of deleting it
            with contextlib.suppress(OSError):
                aside = tempfile.mkdtemp(dir=self._folder, prefix=f"{path.name}.", suffix=".refused")
                path.rename(Path(aside) / path.name)
        try_unlink(path)


def content_of(artifact: Artifact, environment: EnvironmentFingerprint) -> bytes:
    """Return the bytes of an artifact's file."""
    header = _Header(environment.digest(), artifact.key, artifact.label, artifact.about)
    return canonical_json(vars(header)) + b"\n" + artifact.payload


def artifact_of(name: str, content: bytes, environment: EnvironmentFingerprint) -> Artifact:
    """Return the artifact in a file's bytes. Raises InvalidArtifactError for damage, another environment or name."""
    end = content.find(b"\n", 0, MAX_BYTES)
    header: _Header = decoded(_Header, parse_json(content[: max(end, 0)]))
    if header.environment != environment.digest():
        raise InvalidArtifactError("it was compiled in another environment")
    if not header.label.isprintable():
        raise InvalidArtifactError("its label is not printable text")
    artifact = Artifact(header.key, header.label, header.about, content[end + 1 :])
    try:
        name_matches = artifact.name == name
    except ValueError:  # NaN or infinity in `about`
        name_matches = False
    if not name_matches:
        raise InvalidArtifactError("its name does not match its content")
    return artifact
