"""One region on its way into a store, spoiled in every way: one matrix for files of a store and of a bundle."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from compile_cache.store.artifact_store import Artifact, content_of
from compile_cache.store.fingerprint import EnvironmentFingerprint


@dataclass
class Entry:
    """The file of a region. header: JSON, or the bytes before the payload."""

    name: str
    header: Any
    payload: bytes

    @property
    def file(self) -> str:
        return f"{self.name}.region"

    def content(self) -> bytes:
        header = self.header if isinstance(self.header, bytes) else json.dumps(self.header).encode() + b"\n"
        return header + self.payload


Change = Callable[[Entry], object]


def entry_of(artifact: Artifact, environment: EnvironmentFingerprint) -> Entry:
    header, _, payload = content_of(artifact, environment).partition(b"\n")
    return Entry(artifact.name, json.loads(header), payload)


def _header(**values: object) -> Change:
    return lambda entry: entry.header.update(values)


def _payload(change: Callable[[bytes], bytes]) -> Change:
    return lambda entry: setattr(entry, "payload", change(entry.payload))


def _instead(**values: object) -> Change:
    return lambda entry: vars(entry).update(values)


NAME = "its name does not match its content"
# What is wrong, and the reason that a store logs and an import reports.
INVALID: dict[str, tuple[Change, str]] = {
    "truncated payload": (_payload(lambda code: code[:-1]), NAME),
    "longer payload": (_payload(lambda code: code + b"!"), NAME),
    "empty payload": (_payload(lambda _: b""), NAME),
    "one byte differs": (_payload(lambda code: b"\0" + code[1:]), NAME),
    "header is missing": (_instead(header=b""), "its manifest is damaged"),
    "truncated header": (_instead(header=b'{"environment": \n'), "its manifest is damaged"),
    "header is nested too deep": (_instead(header=b"[" * 200_000 + b"\n"), "its manifest is damaged"),
    "header is not an object": (_instead(header=[]), "[] is no dict"),
    "an unknown part": (_header(driver=580), "has no ['driver']"),
    "no key": (lambda entry: entry.header.pop("key"), "'key'"),
    "a label of another kind": (_header(label=True), "True is no str"),
    "about is not an object": (_header(about=3), "3 is no dict"),
    "about was changed": (_header(about={"static": [7]}), NAME),
    "about holds infinity": (_header(about={"static": float("inf")}), NAME),
    "another environment": (_header(environment="0" * 64), "it was compiled in another environment"),
    "no environment": (_header(environment=None), "None is no str"),
    "another key that begins alike": (_header(key="a" * 63 + "b"), NAME),
    "a key that is a path": (_header(key="../../../../../../etc/passwd"), NAME),
    "a label for the terminal": (_header(label="\x1b[2J"), "its label is not printable text"),
    "another name": (_instead(name=f"{'a' * 16}-{'0' * 16}"), NAME),
}
