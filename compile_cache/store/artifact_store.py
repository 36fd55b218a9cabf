"""Compiled regions on disk, shared by every process and model on the machine.

    FOLDER/<environment>/environment.json      the environment, in readable form; bundles use it too
    FOLDER/<environment>/<key>-<content>.json  manifest: key, label, size and SHA-256 of the payload
    FOLDER/<environment>/<key>-<content>.bin   payload: machine code and torch's own pickles
    FOLDER/<environment>/<key>.lock            held by the process that compiles this key

A payload is executable code, so the store refuses a folder that other users can write to or exchange, and a file of
another user. An artifact that is damaged or from another environment is removed and compiled again. An error in the
store never costs more than a compile.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .codec import InvalidArtifactError as InvalidArtifactError
from .codec import canonical_json, parse_json, read_regular_file
from .fingerprint import FORMAT_VERSION, EnvironmentFingerprint
from .private_files import NotPrivateError, files_in, make_private, require_private, try_unlink, write_file

logger = logging.getLogger(__name__)

ENVIRONMENT_FILE = "environment.json"
DIGEST_CHARS = 16  # characters of a digest in a file name; the manifest has the whole digest
_POLL_SECONDS = 0.2  # time between two checks for a cancellation
_ABANDONED_SECONDS = 3600.0  # a half-written file of this age has no writer any more


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


class ArtifactStore:
    """The artifacts of one environment. Safe for several processes and threads."""

    def __init__(self, folder: Path, environment: EnvironmentFingerprint, limit_bytes: int) -> None:
        """Make the folder. Raises StoreError if that fails, or if other users can write to it or exchange it."""
        self.environment = environment
        self._root = folder
        self._folder = folder / environment.digest()[:DIGEST_CHARS]
        self._limit = limit_bytes
        try:
            for each in (folder, self._folder):
                make_private(each)
                require_private(each)
            path, content = self._folder / ENVIRONMENT_FILE, canonical_json(asdict(environment))
            if not path.is_file() or path.read_bytes() != content:
                write_file(path, content)
        except NotPrivateError as error:
            raise StoreError(str(error)) from error
        except OSError as error:
            raise StoreError(f"compiled code cannot be kept in {folder}: {error}; set RESOLUTE_STORE") from error

    @staticmethod
    def is_new(folder: Path) -> bool:
        """True if `folder` has no artifacts of any environment."""
        return not any(folder.glob("*/*-*.bin"))

    # --- reading -----------------------------------------------------------------------------------------------

    def load(self, key: str, known: frozenset[str] = frozenset()) -> list[Artifact]:
        """The artifacts of a key, without those whose name is in `known`. Invalid ones are removed and logged."""
        found = []
        for path in files_in(self._folder, f"{key[:DIGEST_CHARS]}-*.json"):
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
                    os.utime(path)  # `_trim` removes the least recently used one first
        return found

    def read(self, name: str) -> Artifact:
        """Read one artifact without touching it. Raises InvalidArtifactError, or OSError if it cannot be read."""
        return self._read(self._folder / f"{name}.json")

    def _read(self, path: Path) -> Artifact:
        manifest = checked_manifest(parse_json(read_regular_file(path)))
        payload = read_regular_file(path.with_suffix(".bin"), manifest["bytes"])
        return verified_artifact(path.stem, manifest, payload, self.environment)

    def discard(self, name: str, why: str) -> None:
        """Remove an invalid artifact and log `why`."""
        logger.warning("Resolute: the stored region %s is invalid (%s); it will be compiled again", name, why)
        self._remove(name)

    def names(self) -> list[str]:
        """Names of all artifacts of this environment."""
        return [path.stem for path in files_in(self._folder, "*-*.json") if path.is_file()]

    def sizes(self) -> dict[str, int]:
        """Payload size in bytes of each artifact of this environment, by name."""
        return {path.stem: size for _, size, path in self._by_age() if path.parent == self._folder}

    def report(self) -> dict[str, int]:
        """Number of artifacts of this environment (`regions`), bytes of all environments (`bytes`), and the `limit`."""
        return {"regions": len(self.names()), "bytes": sum(size for _, size, _ in self._by_age()), "limit": self._limit}

    # --- writing -----------------------------------------------------------------------------------------------

    def save(self, artifact: Artifact) -> bool:
        """Store an artifact. Returns False, and logs why, if that fails, for example on a full disk."""
        try:
            # Write the manifest last: a payload without a manifest is never read.
            write_file(self._folder / f"{artifact.name}.bin", artifact.payload)
            write_file(self._folder / f"{artifact.name}.json", canonical_json(manifest_of(artifact, self.environment)))
            self._trim(artifact.name)
        except OSError as error:
            logger.warning("Resolute: %s was compiled but could not be stored (%s)", artifact.label, error)
            return False
        return True

    @contextlib.contextmanager
    def build_lock(self, key: str, raise_if_cancelled: Callable[[], None], patience: float = 600.0) -> Iterator[None]:
        """Lock a key while compiling it: one process compiles, the others wait and then load the result.

        Calls `raise_if_cancelled` while waiting. After `patience` seconds the caller compiles without the lock.
        """
        import filelock  # a dependency of torch; inspecting a bundle needs neither, so import it here

        lock = filelock.FileLock(self._folder / f"{key[:DIGEST_CHARS]}.lock")
        deadline = time.monotonic() + patience
        try:
            while time.monotonic() < deadline:
                try:
                    lock.acquire(timeout=_POLL_SECONDS)
                    break
                except filelock.Timeout:
                    raise_if_cancelled()
                except Exception as error:  # noqa: BLE001 (a file system without locks raises several classes)
                    logger.debug("no lock in %s: %s", self._folder, error)
                    break
            yield
        finally:
            with contextlib.suppress(OSError):
                lock.release()

    # --- bounds ------------------------------------------------------------------------------------------------

    def _by_age(self) -> list[tuple[float, int, Path]]:
        """(time of last use, bytes, manifest path) of every artifact of every environment, oldest first."""
        found = []
        for path in files_in(self._root, "*/*.json"):
            if path.name == ENVIRONMENT_FILE:
                continue
            with contextlib.suppress(OSError):
                found.append((path.stat().st_mtime, path.with_suffix(".bin").stat().st_size, path))
        return sorted(found)

    def _trim(self, newest: str) -> None:
        """Keep the artifact `newest`, however large it is: by its time another one may be newer, if the clock moved."""
        entries = self._by_age()
        total = sum(size for _, size, _ in entries)
        for _, size, path in entries:
            if total <= self._limit:
                break
            if path.stem == newest:
                continue
            try_unlink(path)
            try_unlink(path.with_suffix(".bin"))
            total -= size
        for pattern in ("*/*.tmp", "*/*.bin"):
            for path in files_in(self._root, pattern):
                with contextlib.suppress(OSError):
                    whole = path.suffix == ".bin" and path.with_suffix(".json").exists()
                    # A time in the future is from before the clock went back.
                    if not whole and abs(time.time() - path.stat().st_mtime) > _ABANDONED_SECONDS:
                        try_unlink(path)

    def _remove(self, name: str) -> None:
        for ending in (".json", ".bin"):
            path = self._folder / f"{name}{ending}"
            if path.is_dir() and not path.is_symlink():  # a user's folder: move it aside instead of deleting it
                with contextlib.suppress(OSError):
                    aside = tempfile.mkdtemp(dir=self._folder, prefix=f"{path.name}.", suffix=".refused")
                    path.rename(Path(aside) / path.name)
            try_unlink(path)


def checked_manifest(manifest: Any) -> dict[str, Any]:
    """Return the manifest. Raises InvalidArtifactError if it is not a manifest of this version."""
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
    """The manifest: everything about an artifact except its payload."""
    return {
        "format": FORMAT_VERSION,
        "environment": environment.digest(),
        "key": artifact.key,
        "label": artifact.label,
        "sha256": hashlib.sha256(artifact.payload).hexdigest(),
        "bytes": len(artifact.payload),
        "about": artifact.about,
    }


def verified_artifact(
    name: str, manifest: Mapping[str, Any], payload: bytes, environment: EnvironmentFingerprint
) -> Artifact:
    """The artifact of a checked manifest and its payload.

    Raises InvalidArtifactError if the payload, the name or the environment does not match the manifest.
    """
    if len(payload) != manifest["bytes"]:
        raise InvalidArtifactError(f"its payload has {len(payload)} bytes instead of {manifest['bytes']}")
    if hashlib.sha256(payload).hexdigest() != manifest["sha256"]:
        raise InvalidArtifactError("its payload is damaged")
    if manifest["environment"] != environment.digest():
        raise InvalidArtifactError("it was compiled in another environment")
    artifact = Artifact(manifest["key"], manifest["label"], manifest["about"], payload)
    try:
        name_matches = artifact.name == name
    except ValueError:  # NaN or infinity in `about`
        name_matches = False
    if not name_matches:
        raise InvalidArtifactError("its name does not match its content")
    return artifact
