"""One region on its way into a store, spoiled in every way: one matrix for files of a store and of a bundle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from compile_cache.store.artifact_store import Artifact, manifest_of
from compile_cache.store.fingerprint import EnvironmentFingerprint


@dataclass
class Entry:
    """The two files of a region. manifest: JSON, or the bytes of its file. None: there is no such file."""

    name: str
    manifest: Any
    payload: bytes | None

    def files(self) -> dict[str, bytes]:
        """Contents by the names of files."""
        text = self.manifest if isinstance(self.manifest, bytes) else json.dumps(self.manifest).encode()
        found = {f"{self.name}.json": None if self.manifest is None else text, f"{self.name}.bin": self.payload}
        return {name: content for name, content in found.items() if content is not None}


Change = Callable[[Entry], object]


def entry_of(artifact: Artifact, environment: EnvironmentFingerprint) -> Entry:
    return Entry(artifact.name, manifest_of(artifact, environment), artifact.payload)


def _manifest(**values: object) -> Change:
    return lambda entry: entry.manifest.update(values)


def _payload(change: Callable[[bytes], bytes]) -> Change:
    return lambda entry: setattr(entry, "payload", change(entry.payload or b""))


def _instead(**values: object) -> Change:
    return lambda entry: vars(entry).update(values)


def _of_other_code(entry: Entry) -> None:
    """The payload matches its checksum but not the name."""
    entry.payload = b"other code"
    entry.manifest.update(sha256=hashlib.sha256(entry.payload).hexdigest(), bytes=len(entry.payload))


NAME = "its name does not match its content"
# What is wrong, and the reason that a store logs. "": files of a store cannot be so, or it does not matter there.
INVALID: dict[str, tuple[Change, str]] = {
    "truncated payload": (_payload(lambda code: code[:-1]), "its payload has 1028 bytes instead of 1029"),
    "longer payload": (_payload(lambda code: code + b"!"), "has 1030 bytes instead of 1029"),
    "empty payload": (_payload(lambda _: b""), "its payload has 0 bytes"),
    "one byte differs": (_payload(lambda code: b"\0" + code[1:]), "its payload is damaged"),
    "payload is missing": (_instead(payload=None), "No such file"),
    "payload of other code": (_of_other_code, NAME),
    "manifest is missing": (_instead(manifest=None), ""),
    "truncated manifest": (_instead(manifest=b'{"format": '), "its manifest is damaged"),
    "manifest is nested too deep": (_instead(manifest=b"[" * 200_000), "its manifest is damaged"),
    "manifest is not an object": (_instead(manifest=[]), "its format is None"),
    "a future format": (_manifest(format=99), "its format is 99, and this version of Resolute reads"),
    "a format of another kind": (_manifest(format="\x1b[2J"), r"its format is '\x1b[2J'"),
    "no checksum": (_manifest(sha256=None), "lacks 'sha256'"),
    "a size that is not a number": (_manifest(bytes=True), "lacks 'bytes'"),
    "a size below zero": (_manifest(bytes=-1), "bytes instead of -1"),
    "a size beyond any disk": (_manifest(bytes=10**400), "its payload has 1029 bytes instead of 1000"),
    "about is not an object": (_manifest(about=3), "lacks 'about'"),
    "about was changed": (_manifest(about={"static": [7]}), NAME),
    "about holds infinity": (_manifest(about={"static": float("inf")}), NAME),
    "another environment": (_manifest(environment="0" * 64), "it was compiled in another environment"),
    "no environment": (_manifest(environment=None), "lacks 'environment'"),
    "another key that begins alike": (_manifest(key="a" * 63 + "b"), NAME),
    "a key that is a path": (_manifest(key="../../../../../../etc/passwd"), NAME),
    "a label for the terminal": (_manifest(label="\x1b[2J"), ""),
    "another name": (_instead(name=f"{'a' * 16}-{'0' * 16}"), NAME),
}
# The reason that an import gives where it is another one.
IN_A_BUNDLE = {
    "payload is missing": ".bin is missing",
    "manifest is missing": "it is no part of a region",
    "manifest is not an object": "its manifest is damaged",
    "a size beyond any disk": "its manifest is damaged",
    "a key that is a path": "its key is not a digest",
    "a label for the terminal": "its label is not printable text",
}
