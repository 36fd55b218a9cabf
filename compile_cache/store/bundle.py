"""Export the compiled regions of one environment to one file, and import it on another machine of the same kind.

    bundle.json           the bundle's format, the environment, and the name and manifest of each artifact
    regions/<name>.bin    payload, as in the store

The file is an uncompressed zip, and the same content gives the same bytes. ComfyUI will run the code of an imported
bundle, so only an explicit command imports one, and nothing in this module executes a payload.
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
    DIGEST_CHARS,
    ENVIRONMENT_FILE,
    Artifact,
    ArtifactStore,
    InvalidArtifactError,
    canonical_json,
    checked_manifest,
    manifest_of,
    parse_json,
    read_regular_file,
    verified_artifact,
)
from .fingerprint import EnvironmentFingerprint
from .private_files import atomic_write

logger = logging.getLogger(__name__)

# Increase it whenever the layout of the file changes. Artifacts have their own FORMAT_VERSION.
BUNDLE_FORMAT = 1

_INDEX = "bundle.json"
_PAYLOADS = "regions/"
_MAX_INDEX = 64 << 20  # bytes; each artifact takes a few thousand
_MAX_PAYLOAD = 1 << 50  # bytes; larger claims are damage, and would make sums unreadable
_MB = 1 << 20
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")
_KEY = re.compile(r"[0-9a-f]{64}")
# What `zipfile` raises for a file that is not a zip or is damaged.
_UNREADABLE = (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, OSError, KeyError)


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
    """The index of a bundle: its environment, and (name, manifest) of each artifact, not yet verified."""

    environment: EnvironmentFingerprint
    artifacts: list[tuple[str, Mapping[str, Any]]]


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
    artifacts: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    size = 0
    try:
        with atomic_write(file) as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as container:
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
            container.writestr(_member(_INDEX), canonical_json(index))
    except OSError as error:
        raise BundleError(f"{file} cannot be written: {error.strerror or error}.") from error
    return BundleReport(store.environment, [each["name"] for each in artifacts], [], refused, size)


def _member(name: str) -> zipfile.ZipInfo:
    """A zip entry without the current time and system, so that the same content gives the same bytes."""
    info = zipfile.ZipInfo(name)  # its date is 1980-01-01
    info.create_system = 3
    info.external_attr = 0o600 << 16
    return info


# --- reading ---------------------------------------------------------------------------------------------------


def read_contents(file: Path) -> Contents:
    """Read a bundle's index. Raises BundleError if `file` is not a bundle of this version."""
    with _opened(file) as container:
        return _contents(file, container)


def import_bundle(file: Path, store: ArtifactStore) -> BundleReport:
    """Verify a bundle's artifacts one by one and copy the valid ones into the store; the others are refused.

    Raises BundleError if `file` is not a bundle of this version, does not fit into the store, or was made in another
    environment; the message then names each component that differs.
    """
    with _opened(file) as container:
        contents = _contents(file, container)
        require_same_environment(contents.environment, store.environment)
        require_room(contents, store)
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
            report.refused[ascii(stray)] = "the index does not list it"
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


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[zipfile.ZipFile]:
    try:
        container = zipfile.ZipFile(file)
    except FileNotFoundError:
        raise BundleError(f"There is no file {file}.") from None
    except _UNREADABLE as error:
        raise BundleError(f"{file} is not a bundle, or it is damaged: {error}.") from error
    with container:
        yield container


def _contents(file: Path, container: zipfile.ZipFile) -> Contents:
    try:
        index = parse_json(_bytes_of(container, _INDEX, _MAX_INDEX))
    except InvalidArtifactError as error:
        raise BundleError(f"{file} is not a bundle, or it is damaged: {error}.") from error
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
        raise BundleError(f"{file} is damaged: its index has no list of artifacts.")
    return Contents(environment, [(each["name"], each["manifest"]) for each in listed])


def _is_entry(value: Any) -> bool:
    """True if it has a manifest and a name in the store's form, which cannot be a path."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and _NAME.fullmatch(value["name"]) is not None
        and isinstance(value.get("manifest"), dict)
        and _size(value["manifest"]) <= _MAX_PAYLOAD
    )


def _size(manifest: Mapping[str, Any]) -> int:
    """The payload size that the manifest claims, in bytes; 0 if it claims none."""
    size = manifest.get("bytes")
    return size if type(size) is int else 0


def _verified(
    container: zipfile.ZipFile, name: str, claimed: Mapping[str, Any], environment: EnvironmentFingerprint
) -> Artifact:
    manifest = checked_manifest(claimed)
    if _KEY.fullmatch(manifest["key"]) is None:
        raise InvalidArtifactError("its key is not a digest")
    if not manifest["label"].isprintable():
        raise InvalidArtifactError("its label is not printable text")
    payload = _bytes_of(container, f"{_PAYLOADS}{name}.bin", manifest["bytes"])
    return verified_artifact(name, manifest, payload, environment)


def _bytes_of(container: zipfile.ZipFile, name: str, max_bytes: int) -> bytes:
    """Read a zip entry of at most `max_bytes`. Raises InvalidArtifactError."""
    try:
        info = container.getinfo(name)
        if info.compress_type != zipfile.ZIP_STORED:
            raise InvalidArtifactError(f"{name} is compressed, and bundles are not")
        if info.file_size > max_bytes:
            raise InvalidArtifactError(f"{name} has {info.file_size} bytes instead of {max_bytes}")
        with container.open(info) as stream:
            return stream.read(max(max_bytes, 0))
    except _UNREADABLE as error:
        raise InvalidArtifactError(f"{name} cannot be read: {error}") from error


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
