"""Export the compiled regions of one environment to one file, and import it on another machine of the same kind.

    environment.json    the environment, as in the store
    <name>.json         manifest of an artifact, as in the store
    <name>.bin          its payload, as in the store

The file is a tar of the store's folder, and the same content gives the same bytes. ComfyUI will run the code of an
imported bundle, so only an explicit command imports one, and nothing in this module executes or unpacks a payload: what
an artifact claims is verified as it is when the store loads one.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

from ..errors import UserError
from .artifact_store import (
    DIGEST_CHARS,
    ENVIRONMENT_FILE,
    Artifact,
    ArtifactStore,
    checked_manifest,
    manifest_of,
    verified_artifact,
)
from .codec import MAX_BYTES, InvalidArtifactError, canonical_json, parse_json, read_regular_file
from .fingerprint import EnvironmentFingerprint
from .private_files import atomic_write

logger = logging.getLogger(__name__)

_BLOCK = tarfile.BLOCKSIZE
_MAX_PAYLOAD = 1 << 50  # bytes; larger claims are damage, and would make sums unreadable
_MB = 1 << 20
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")
_KEY = re.compile(r"[0-9a-f]{64}")


class BundleError(UserError):
    """The bundle cannot be written or must not be imported; the message says why."""


@dataclass(frozen=True)
class BundleReport:
    """The result of each artifact, by name. refused: name -> reason; bytes: payload size of `done`."""

    environment: EnvironmentFingerprint
    done: list[str] = field(default_factory=list)  # exported or imported
    known: list[str] = field(default_factory=list)  # already in the store
    refused: dict[str, str] = field(default_factory=dict)
    bytes: int = 0


@dataclass(frozen=True)
class Contents:
    """A bundle's environment, and (name, manifest) of each artifact, not yet verified. refused: what cannot be one."""

    environment: EnvironmentFingerprint
    artifacts: list[tuple[str, Mapping[str, Any]]]
    refused: dict[str, str] = field(default_factory=dict)


# --- writing ---------------------------------------------------------------------------------------------------


def environments(folder: Path) -> dict[str, EnvironmentFingerprint]:
    """The environments in the store `folder`, by the name of their subfolder."""
    found = {}
    for path in sorted(folder.glob(f"*/{ENVIRONMENT_FILE}")):
        try:
            environment = _environment(parse_json(read_regular_file(path)))
            if environment.digest()[:DIGEST_CHARS] != path.parent.name:
                raise InvalidArtifactError("its name does not match its environment")
        except (OSError, InvalidArtifactError) as error:
            logger.warning("Resolute: %s is left out (%s)", path.parent, error)
            continue
        found[path.parent.name] = environment
    return found


def export_bundle(store: ArtifactStore, file: Path) -> BundleReport:
    """Write the artifacts of the store's environment to `file`, atomically. Damaged ones are reported as refused.

    Raises BundleError if there is no artifact to export or `file` cannot be written.
    """
    report = BundleReport(store.environment)
    size = 0
    try:
        with atomic_write(file) as stream, tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            _add(tar, ENVIRONMENT_FILE, canonical_json(asdict(store.environment)))
            for name in store.names():
                try:
                    artifact = store.read(name)
                except (OSError, InvalidArtifactError) as error:
                    report.refused[name] = str(error)
                    continue
                _add(tar, f"{name}.json", canonical_json(manifest_of(artifact, store.environment)))
                _add(tar, f"{name}.bin", artifact.payload)
                report.done.append(name)
                size += len(artifact.payload)
            if not report.done:
                why = "".join(f"; {name}: {reason}" for name, reason in report.refused.items())
                raise BundleError(f"There is no compiled region for this environment to export{why}.")
    except OSError as error:
        raise BundleError(f"{file} cannot be written: {error.strerror or error}.") from error
    return BundleReport(store.environment, report.done, [], report.refused, size)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a member without time and owner, so that the same content gives the same bytes."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o600
    tar.addfile(member, io.BytesIO(content))


# --- reading ---------------------------------------------------------------------------------------------------


def read_contents(file: Path) -> Contents:
    """Read a bundle's manifests. Raises BundleError if `file` is not a bundle of this version."""
    with _opened(file) as members:
        return _contents(file, members)


def import_bundle(file: Path, store: ArtifactStore) -> BundleReport:
    """Verify a bundle's artifacts one by one and copy the valid ones into the store; the others are refused.

    Raises BundleError if `file` is not a bundle of this version, does not fit into the store, or was made in another
    environment; the message then names each component that differs.
    """
    with _opened(file) as members:
        contents = _contents(file, members)
        require_same_environment(contents.environment, store.environment)
        require_room(contents, store)
        report = BundleReport(contents.environment, refused=contents.refused)
        size = 0
        for name, manifest in contents.artifacts:
            try:
                artifact = _verified(members, name, manifest, store.environment)
                if _has(store, name):
                    report.known.append(name)
                elif store.save(artifact):
                    report.done.append(name)
                    size += len(artifact.payload)
                else:
                    report.refused[name] = "it could not be written to the store; the log says why"
            except InvalidArtifactError as error:
                report.refused[name] = str(error)
    return BundleReport(report.environment, report.done, report.known, report.refused, size)


def require_same_environment(theirs: EnvironmentFingerprint, ours: EnvironmentFingerprint) -> None:
    """Raise BundleError if the two environments differ; the message names each component that differs."""
    difference = ours.difference(theirs)
    if difference:
        raise BundleError(
            f"This bundle was made in another environment, so nothing was imported. {'; '.join(difference)}. "
            "Make both the same, or export on a machine like this one."
        )


def require_room(contents: Contents, store: ArtifactStore) -> None:
    """Raise BundleError if importing would exceed the store's limit and so evict compiled regions.

    The artifacts of other environments count against the limit; artifacts that the store already has count once.
    """
    present, report = store.sizes(), store.report()
    held, limit = report["bytes"], report["limit"]
    new = sum(max(_size(manifest) - present.get(name, 0), 0) for name, manifest in contents.artifacts)
    if new and held + new > limit:
        raise BundleError(
            f"The bundle adds {new / _MB:.1f} MB to the {held / _MB:.1f} MB in the store, and the store's limit is "
            f"{limit / _MB:.1f} MB. Importing would evict compiled regions, so nothing was imported. Set "
            f"RESOLUTE_STORE_MB to {-(-(held + new) // _MB)} or more, for this command and for ComfyUI."
        )


@dataclass(frozen=True)
class _Members:
    """The members of a bundle: where each begins, and its bytes. Only plain files with their data in place are read:
    `tarfile` itself follows links, expands sparse files, and seeks where a header says.
    """

    stream: IO[bytes]
    places: dict[str, tuple[int, int]]

    def read(self, name: str, max_bytes: int) -> bytes:
        """Raises InvalidArtifactError for a member that is missing or has more than `max_bytes`."""
        if name not in self.places:
            raise InvalidArtifactError(f"{name} is missing")
        start, size = self.places[name]
        if size > max_bytes:
            raise InvalidArtifactError(f"{name} has {size} bytes instead of {max_bytes}")
        self.stream.seek(start)
        return self.stream.read(size)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[_Members]:
    with contextlib.ExitStack() as stack:
        try:
            stream = stack.enter_context(file.open("rb"))
            members = _Members(stream, _places(stream))
        except FileNotFoundError:
            raise BundleError(f"There is no file {file}.") from None
        except (OSError, InvalidArtifactError, tarfile.TarError, ValueError) as error:
            raise BundleError(f"{file} is not a bundle of this version, or it is damaged: {error}.") from error
        yield members


def _places(stream: IO[bytes]) -> dict[str, tuple[int, int]]:
    """Walk the headers. Raises InvalidArtifactError, TarError or ValueError for a file that is no plain tar."""
    end = os.fstat(stream.fileno()).st_size
    places: dict[str, tuple[int, int]] = {}
    while header := stream.read(_BLOCK):
        if not header.strip(b"\0"):
            break
        member = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
        start = stream.tell()
        if member.type != tarfile.REGTYPE or not 0 <= member.size <= end - start:
            raise InvalidArtifactError(f"{member.name!a:.80} is not a plain file, or it is cut")
        if member.name in places:
            raise InvalidArtifactError(f"{member.name!a:.80} is in it twice")
        places[member.name] = start, member.size
        stream.seek(start + -(-member.size // _BLOCK) * _BLOCK)
    return places


def _contents(file: Path, members: _Members) -> Contents:
    try:
        environment = _environment(parse_json(members.read(ENVIRONMENT_FILE, MAX_BYTES)))
    except InvalidArtifactError as error:
        raise BundleError(f"{file}: {error}. Use the same version of Resolute on both machines.") from error
    contents = Contents(environment, [])
    names = {name for name, _, ending in (each.rpartition(".") for each in members.places) if ending == "json"}
    artifacts = sorted(name for name in names if _NAME.fullmatch(name))
    for name in artifacts:
        try:
            contents.artifacts.append((name, _claimed(members, name)))
        except InvalidArtifactError as error:
            contents.refused[name] = str(error)
    known = {ENVIRONMENT_FILE, *(f"{name}{ending}" for name in artifacts for ending in (".json", ".bin"))}
    contents.refused.update({ascii(stray): "it is no part of a region" for stray in members.places.keys() - known})
    return contents


def _claimed(members: _Members, name: str) -> Mapping[str, Any]:
    """A manifest as it is in the bundle. Raises InvalidArtifactError if it claims a size that no artifact has."""
    manifest = parse_json(members.read(f"{name}.json", MAX_BYTES))
    if not isinstance(manifest, dict) or _size(manifest) > _MAX_PAYLOAD:
        raise InvalidArtifactError("its manifest is damaged")
    return manifest


def _size(manifest: Mapping[str, Any]) -> int:
    """The payload size that the manifest claims, in bytes; 0 if it claims none."""
    size = manifest.get("bytes")
    return size if type(size) is int else 0


def _verified(
    members: _Members, name: str, claimed: Mapping[str, Any], environment: EnvironmentFingerprint
) -> Artifact:
    manifest = checked_manifest(claimed)
    if _KEY.fullmatch(manifest["key"]) is None:
        raise InvalidArtifactError("its key is not a digest")
    if not manifest["label"].isprintable():
        raise InvalidArtifactError("its label is not printable text")
    payload = members.read(f"{name}.bin", manifest["bytes"])
    return verified_artifact(name, manifest, payload, environment)


def _has(store: ArtifactStore, name: str) -> bool:
    try:
        store.read(name)
    except (OSError, InvalidArtifactError):
        return False
    return True


def _environment(data: Any) -> EnvironmentFingerprint:
    """The environment in parsed JSON. Raises InvalidArtifactError if its components are not those of this version."""
    kinds = {part.name: int if part.name == "format" else str for part in fields(EnvironmentFingerprint)}
    if not isinstance(data, dict):
        raise InvalidArtifactError("it does not say which environment it is for")
    for name in {**kinds, **data}:
        if name not in kinds or type(data.get(name)) is not kinds[name]:
            raise InvalidArtifactError(f"this version of Resolute cannot compare its environment's {name!a}")
        if not str(data[name]).isprintable():
            raise InvalidArtifactError(f"its environment's '{name}' is not printable text")
    return EnvironmentFingerprint(**data)
