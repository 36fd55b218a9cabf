"""Export the compiled regions of one environment to one file, and import it on another machine of the same kind.

    environment.json    the environment, as in the store
    <name>.region       an artifact, as in the store

The file is a tar of the store's folder, and the same content gives the same bytes. ComfyUI will run the code of an
imported bundle, so only an explicit command imports one, and nothing in this module executes or unpacks a payload. The
claims of an artifact are verified as in a load by the store.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from ..errors import UserError
from .artifact_store import DIGEST_CHARS, ENDING, ENVIRONMENT_FILE, ArtifactStore, artifact_of, content_of
from .codec import InvalidArtifactError, canonical_json, decoded, parse_json, read_regular_file
from .fingerprint import EnvironmentFingerprint
from .private_files import atomic_write

logger = logging.getLogger(__name__)

_BLOCK = tarfile.BLOCKSIZE
_MB = 1 << 20
_NAME = re.compile(r"([0-9a-f]{16}-[0-9a-f]{16})" + re.escape(ENDING))


class BundleError(UserError):
    """The bundle cannot be written or must not be imported; the message says why."""


@dataclass
class BundleReport:
    """The result of each artifact, by name. refused: name -> reason; bytes: size of `done`."""

    environment: EnvironmentFingerprint
    done: list[str] = field(default_factory=list)  # exported or imported
    known: list[str] = field(default_factory=list)  # already in the store
    refused: dict[str, str] = field(default_factory=dict)
    bytes: int = 0


@dataclass(frozen=True)
class Contents:
    """A bundle's environment, and (name, label, bytes) of each valid artifact. refused: invalid member -> reason."""

    environment: EnvironmentFingerprint
    artifacts: list[tuple[str, str, int]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


# --- writing ---------------------------------------------------------------------------------------------------


def environments(folder: Path) -> dict[str, EnvironmentFingerprint]:
    """Return the environments in the store `folder`, by the name of their subfolder."""
    found = {}
    for path in sorted(folder.glob(f"*/{ENVIRONMENT_FILE}")):
        try:
            environment = _environment(read_regular_file(path))
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
    try:
        with atomic_write(file) as stream, tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            _add(tar, ENVIRONMENT_FILE, canonical_json(asdict(store.environment)))
            for name in store.names():
                try:
                    artifact = store.read(name)
                except (OSError, InvalidArtifactError) as error:
                    report.refused[name] = str(error)
                    continue
                content = content_of(artifact, store.environment)
                _add(tar, f"{name}{ENDING}", content)
                report.done.append(name)
                report.bytes += len(content)
            if not report.done:
                why = "".join(f"; {name}: {reason}" for name, reason in report.refused.items())
                raise BundleError(f"There is no compiled region for this environment to export{why}.")
    except OSError as error:
        raise BundleError(f"{file} cannot be written: {error.strerror or error}.") from error
    return report


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a member without time and owner, so that the same content gives the same bytes."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o600
    tar.addfile(member, io.BytesIO(content))


# --- reading ---------------------------------------------------------------------------------------------------


def read_contents(file: Path) -> Contents:
    """Verify the contents of a bundle. Raises BundleError if `file` is not a bundle of this version."""
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
        for name, _, size in contents.artifacts:
            if _has(store, name):
                report.known.append(name)
            elif store.save(artifact_of(name, members.read(f"{name}{ENDING}"), store.environment)):
                report.done.append(name)
                report.bytes += size
            else:
                report.refused[name] = "it could not be written to the store; the log says why"
    return report


def require_same_environment(theirs: EnvironmentFingerprint, ours: EnvironmentFingerprint) -> None:
    """Raise BundleError if the two environments differ; the message names each component that differs."""
    difference = ours.difference(theirs)
    if difference:
        raise BundleError(
            f"This bundle was made in another environment, so nothing was imported. {'; '.join(difference)}. "
            "Make both the same (source is the code of comfy-kitchen and Resolute; settings are "
            "inductor's), or export on a machine like this one."
        )


def require_room(contents: Contents, store: ArtifactStore) -> None:
    """Raise BundleError if importing would exceed the store's limit and so evict compiled regions.

    The artifacts of other environments count against the limit; artifacts that the store already has count once.
    """
    present, report = store.sizes(), store.report()
    held, limit = report["bytes"], report["limit"]
    new = sum(max(size - present.get(name, 0), 0) for name, _, size in contents.artifacts)
    if new and held + new > limit:
        raise BundleError(
            f"The bundle adds {new / _MB:.1f} MB to the {held / _MB:.1f} MB in the store, and the store's limit is "
            f"{limit / _MB:.1f} MB. Importing would evict compiled regions, so nothing was imported. Set "
            f"RESOLUTE_STORE_MB to {-(-(held + new) // _MB)} or more, for this command and for ComfyUI."
        )


@dataclass(frozen=True)
class _Members:
    """The members of a bundle: (start, bytes) of each. Only plain files with their data in place are read, because
    `tarfile` itself follows links, expands sparse files, and seeks to any place that a header names.
    """

    stream: IO[bytes]
    places: dict[str, tuple[int, int]]

    def read(self, name: str) -> bytes:
        """Raises InvalidArtifactError for a member that is missing."""
        if name not in self.places:
            raise InvalidArtifactError(f"{name} is missing")
        start, size = self.places[name]
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
        contents = Contents(_environment(members.read(ENVIRONMENT_FILE)))
    except InvalidArtifactError as error:
        raise BundleError(f"{file}: {error}. Use the same version of Resolute on both machines.") from error
    for member in sorted(members.places.keys() - {ENVIRONMENT_FILE}):
        match = _NAME.fullmatch(member)
        if match is None:
            contents.refused[ascii(member)] = "it is no region"
            continue
        try:
            content = members.read(member)
            artifact = artifact_of(match[1], content, contents.environment)
            contents.artifacts.append((match[1], artifact.label, len(content)))
        except InvalidArtifactError as error:
            contents.refused[match[1]] = str(error)
    return contents


def _has(store: ArtifactStore, name: str) -> bool:
    try:
        store.read(name)
    except (OSError, InvalidArtifactError):
        return False
    return True


def _environment(content: bytes) -> EnvironmentFingerprint:
    """Return the environment in a file. Raises InvalidArtifactError if its components are not this version's."""
    environment: EnvironmentFingerprint = decoded(EnvironmentFingerprint, parse_json(content))
    if strange := [name for name, value in environment.components() if not str(value).isprintable()]:
        raise InvalidArtifactError(f"its environment's '{strange[0]}' is not printable text")
    return environment
