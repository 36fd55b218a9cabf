"""The compiled regions of one environment as one file, for another machine of the same kind.

    bundle.json           the bundle's own format, the environment, and the name and manifest of each artifact
    regions/<name>.bin    payload, as it is in the store

It is a zip without compression, and the same content gives the same bytes. Whoever imports one will run its code, so
only a command of the user's imports, and nothing in here loads what it reads.
"""

from __future__ import annotations

import contextlib
import logging
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import UserError
from .artifact_store import (
    ENVIRONMENT,
    NAMED,
    Artifact,
    ArtifactStore,
    InvalidArtifactError,
    artifact_of,
    canonical,
    checked_manifest,
    manifest_of,
    parse,
    plain_file,
)
from .fingerprint import EnvironmentFingerprint
from .private_files import replacing

logger = logging.getLogger(__name__)

# Raise it whenever the layout of the file changes; what an artifact is has a version of its own.
BUNDLE_FORMAT = 1

_INDEX = "bundle.json"
_PAYLOADS = "regions/"
_MOST_INDEX = 64 << 20  # bytes; each artifact takes some thousands
_MOST_BYTES = 1 << 50  # of a payload: what is counted and told stays a number for people
_MB = 1 << 20
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")
_KEY = re.compile(r"[0-9a-f]{64}")
# What the zip reader raises for a file that is none, or only looks like one.
_UNREADABLE = (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, OSError, KeyError)


class BundleError(UserError):
    """A bundle that cannot be written, or must not be imported; the message says why."""


@dataclass(frozen=True)
class BundleReport:
    """What became of each artifact, by name. `refused` has the reasons, `bytes` counts the payloads of `done`."""

    environment: EnvironmentFingerprint
    done: list[str] = field(default_factory=list)  # written to the file, or imported from it
    known: list[str] = field(default_factory=list)  # the store had it already
    refused: dict[str, str] = field(default_factory=dict)
    bytes: int = 0


@dataclass(frozen=True)
class Contents:
    """The index of a bundle: whom it is for, and (name, manifest) of each artifact. Nothing of it is verified yet."""

    environment: EnvironmentFingerprint
    artifacts: list[tuple[str, Mapping[str, Any]]]


# --- writing ---------------------------------------------------------------------------------------------------


def environments(folder: Path) -> dict[str, EnvironmentFingerprint]:
    """The environments that the store in `folder` has a place for, by the name of that place."""
    found = {}
    for path in sorted(folder.glob(f"*/{ENVIRONMENT}")):
        try:
            environment = _environment(parse(plain_file(path)))
            if environment.digest()[:NAMED] != path.parent.name:
                raise InvalidArtifactError("its name is not that of its environment")
        except (OSError, InvalidArtifactError) as error:
            logger.warning("Resolute: %s is left out (%s)", path.parent, error)
            continue
        found[path.parent.name] = environment
    return found


def export_bundle(store: ArtifactStore, file: Path) -> BundleReport:
    """Write the artifacts of the store's environment to `file`, all or nothing. Damaged ones are left out and told.

    Raises BundleError where there is none, or `file` cannot be written.
    """
    artifacts: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    size = 0
    try:
        with replacing(file) as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as container:
            for name in store.names():
                try:
                    artifact = store.read(name)
                except (OSError, InvalidArtifactError) as error:
                    refused[name] = str(error)
                    continue
                container.writestr(_member(f"{_PAYLOADS}{name}.bin"), artifact.payload)
                artifacts.append({"name": name, "manifest": manifest_of(artifact, store.environment)})
                size += len(artifact.payload)
            if not artifacts:
                why = "".join(f"; {name}: {reason}" for name, reason in refused.items())
                raise BundleError(f"There is no compiled region for this environment to export{why}.")
            index = {"bundle": BUNDLE_FORMAT, "environment": asdict(store.environment), "artifacts": artifacts}
            container.writestr(_member(_INDEX), canonical(index))
    except OSError as error:
        raise BundleError(f"{file} cannot be written: {error.strerror or error}.") from error
    return BundleReport(store.environment, [each["name"] for each in artifacts], [], refused, size)


def _member(name: str) -> zipfile.ZipInfo:
    """An entry that says nothing of the time and the system that it was made on."""
    info = zipfile.ZipInfo(name)  # its date is 1980-01-01
    info.create_system = 3
    info.external_attr = 0o600 << 16
    return info


# --- reading ---------------------------------------------------------------------------------------------------


def read_contents(file: Path) -> Contents:
    """What a bundle says is in it. Raises BundleError for what is no bundle of this version."""
    with _opened(file) as container:
        return _contents(file, container)


def import_bundle(file: Path, store: ArtifactStore) -> BundleReport:
    """Put a bundle's artifacts into the store. Each one is checked; those that are not valid are refused alone.

    Raises BundleError for what is no bundle of this version, or one of another environment than the store's: the
    message then names each component that differs.
    """
    with _opened(file) as container:
        contents = _contents(file, container)
        demand_same(contents.environment, store.environment)
        demand_room(contents, store)
        report = BundleReport(contents.environment)
        size = 0
        expected = {_INDEX}
        for name, manifest in contents.artifacts:
            expected.add(f"{_PAYLOADS}{name}.bin")
            if name in report.done or name in report.known:
                continue
            try:
                artifact = _verified(container, name, manifest, store.environment)
                if _has(store, name):
                    report.known.append(name)
                elif store.save(artifact):
                    report.done.append(name)
                    size += len(artifact.payload)
                else:
                    report.refused[name] = "it could not be written to the store; the log says why"
            except InvalidArtifactError as error:
                report.refused[name] = str(error)
        for stray in sorted({*container.namelist()} - expected):
            report.refused[ascii(stray)] = "it is no part of the bundle"
    return BundleReport(report.environment, report.done, report.known, report.refused, size)


def demand_same(theirs: EnvironmentFingerprint, ours: EnvironmentFingerprint) -> None:
    """Raises BundleError where code for `theirs` is not code for `ours`, naming what differs."""
    difference = ours.difference(theirs)
    if difference:
        raise BundleError(
            f"This bundle was made in another environment, so nothing was imported. {'; '.join(difference)}. "
            "Make both the same, or export on a machine like this one."
        )


def demand_room(contents: Contents, store: ArtifactStore) -> None:
    """Raises BundleError where the store would throw some of the bundle away again, or others for it.

    What the store holds for other environments counts, as it does against the limit; what it has of the bundle already
    counts once.
    """
    there, report = store.sizes(), store.report()
    held, limit = report["bytes"], report["limit"]
    new = sum(max(_size(manifest) - there.get(name, 0), 0) for name, manifest in contents.artifacts)
    if new and held + new > limit:
        raise BundleError(
            f"The bundle adds {new / _MB:.1f} MB to the {held / _MB:.1f} MB that the store holds, and the store may "
            f"have {limit / _MB:.1f} MB: compiled regions would be thrown away for it, so nothing was imported. Set "
            f"RESOLUTE_STORE_MB to {-(-(held + new) // _MB)} or more, for this command and for ComfyUI."
        )


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[zipfile.ZipFile]:
    try:
        container = zipfile.ZipFile(file)
    except FileNotFoundError:
        raise BundleError(f"There is no file {file}.") from None
    except _UNREADABLE as error:
        raise BundleError(f"{file} is no bundle, or a damaged one: {error}.") from error
    with container:
        yield container


def _contents(file: Path, container: zipfile.ZipFile) -> Contents:
    try:
        index = parse(_bytes_of(container, _INDEX, _MOST_INDEX))
    except InvalidArtifactError as error:
        raise BundleError(f"{file} is no bundle, or a damaged one: {error}.") from error
    version = index.get("bundle") if isinstance(index, dict) else None
    if version != BUNDLE_FORMAT:
        raise BundleError(
            f"{file} has the bundle format {version!r:.40}, and this version of Resolute reads {BUNDLE_FORMAT}. "
            "Use the same version on both machines."
        )
    try:
        environment = _environment(index.get("environment"))
    except InvalidArtifactError as error:
        raise BundleError(f"{file}: {error}. Use the same version of Resolute on both machines.") from error
    listed = index.get("artifacts")
    if not isinstance(listed, list) or not all(map(_is_entry, listed)):
        raise BundleError(f"{file} is damaged: it does not say what is in it.")
    return Contents(environment, [(each["name"], each["manifest"]) for each in listed])


def _is_entry(value: Any) -> bool:
    """Whether it has a name of the store's own form, which no path has, and a manifest."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and _NAME.fullmatch(value["name"]) is not None
        and isinstance(value.get("manifest"), dict)
        and _size(value["manifest"]) <= _MOST_BYTES
    )


def _size(manifest: Mapping[str, Any]) -> int:
    """Bytes that a payload is said to have; 0 where nothing is said that could be."""
    size = manifest.get("bytes")
    return size if type(size) is int else 0


def _verified(
    container: zipfile.ZipFile, name: str, told: Mapping[str, Any], environment: EnvironmentFingerprint
) -> Artifact:
    manifest = checked_manifest(told)
    if _KEY.fullmatch(manifest["key"]) is None:
        raise InvalidArtifactError("its key is no digest")
    if not manifest["label"].isprintable():
        raise InvalidArtifactError("its label is no text")
    payload = _bytes_of(container, f"{_PAYLOADS}{name}.bin", manifest["bytes"])
    return artifact_of(name, manifest, payload, environment)


def _bytes_of(container: zipfile.ZipFile, name: str, most: int) -> bytes:
    """A member's content, never more than `most` bytes. Raises InvalidArtifactError."""
    try:
        info = container.getinfo(name)
        if info.compress_type != zipfile.ZIP_STORED:
            raise InvalidArtifactError(f"{name} is compressed, which no bundle is")
        if info.file_size > most:
            raise InvalidArtifactError(f"{name} has {info.file_size} bytes instead of {most}")
        with container.open(info) as stream:
            return stream.read(max(most, 0))
    except _UNREADABLE as error:
        raise InvalidArtifactError(f"{name} cannot be read: {error}") from error


def _has(store: ArtifactStore, name: str) -> bool:
    try:
        store.read(name)
    except (OSError, InvalidArtifactError):
        return False
    return True


def _environment(told: Any) -> EnvironmentFingerprint:
    """From its components as plain data. Raises InvalidArtifactError for what has other components."""
    kinds = {part.name: int if part.name == "format" else str for part in fields(EnvironmentFingerprint)}
    if not isinstance(told, dict):
        raise InvalidArtifactError("it does not say which environment it is for")
    for name in {**kinds, **told}:
        if name not in kinds or type(told.get(name)) is not kinds[name]:
            raise InvalidArtifactError(f"this version of Resolute cannot compare its environment's {name!a}")
        if not str(told[name]).isprintable():
            raise InvalidArtifactError(f"its environment's '{name}' is no text")
    return EnvironmentFingerprint(**told)
