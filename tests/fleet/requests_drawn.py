"""Requests for the ingress as hypothesis draws them: each route with good, wrong and hostile parts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from hypothesis import strategies as st

from .in_process import drawing

LATEST = "<the latest id>"  # the test puts the id of the latest good prompt in its place
_ID = "6f0f4a0e-0000-4000-8000-000000000001"
_SITES = ["", "same-origin", "cross-site"]
_ORIGINS = ["", "http://127.0.0.1:8188", "https://evil.example", "null", "http://[", "http://x:y", "ü"]
_HOSTS = ["127.0.0.1:8188", "[::1]:8188", "192.0.2.7", "[::1", ":", "127.0.0.1:x", ""]
_RAW = [
    "1e999",
    "-1e999",
    "NaN",
    "-Infinity",
    "1" * 50,
    "1" * 5000,
    '"\\ud800"',
    '"\\u0000"',
    "[" * 2000,
    "[" * 80 + "]" * 80,
]
_NAMES = [
    "prompt", "prompt_id", "number", "front", "extra_data", "client_id", "partial_execution_targets", "delete", "clear",
    "replicas", "plan", "draw", "class_type", "inputs", "seed", "need", "token", "",
]  # fmt: skip
_POSTS = [
    "/prompt",
    "/prompt",
    "/prompt",
    "/queue",
    "/history",
    "/interrupt",
    "/resolute/warm-up",
    "/upload/image",
    "/x",
]
_GETS = ["history", "queue", "prompt", "view", "ready", "models", "object_info", "features", "resolute", "fleet", "api"]
_PARTS = [
    *_GETS, "ws", "internal", "logs", ".", "..", "%2e%2e", "..%2Finternal", "%252e", "%00", "%3F", "%0A", "%ff",
    "%", "#", "checkpoints", "", _ID, LATEST, "%F0%9F%98%80",
]  # fmt: skip
_VALUES = [
    "",
    "output",
    "input",
    "temp",
    "r",
    "..",
    "../..",
    "\0",
    "a.png",
    "x" * 300,
    "-1",
    "0",
    "9" * 30,
    "1.5",
    "/etc",
]
_QUERIES = ["filename", "subfolder", "type", "max_items", "preview", "clientId"]
_ODD = ["", "a.png", "..", "a\0b", "x" * 300, "a/../b", "\ud800", "ü", '"', "folder"]

texts = st.sampled_from([*_ODD, *_NAMES, _ID, LATEST]) | st.text(max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_NAMES) | texts, inner, max_size=4),
    max_leaves=6,
)


@dataclass(frozen=True)
class Drawn:
    """A request. path: with its percent signs."""

    method: str
    path: str
    body: bytes = b""
    query: str = ""
    headers: dict[str, str] = field(default_factory=dict)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """A good body, one with a few fields exchanged, one with raw JSON in it, or any bytes."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(st.binary(max_size=20))
    body: Any = {"prompt": drawing(draw(st.integers(0, 3)))}
    if kind >= 3:
        changed = draw(st.dictionaries(st.sampled_from(_NAMES), values, min_size=1, max_size=3))
        target = body if kind < 8 else draw(st.sampled_from([body["prompt"], body["prompt"]["draw"]]))
        target.update(changed)
    text = json.dumps(body)
    if kind in (1, 2, 7):
        name, raw = draw(st.sampled_from(_NAMES)), draw(st.sampled_from(_RAW))
        text = f"{text[:-1]}, {json.dumps(name)}: {raw}}}"
    return text.encode()


@st.composite
def uploads(draw: st.DrawFn) -> tuple[bytes, dict[str, str]]:
    """A form, which may lack its file, have odd names, or no end."""
    parts = []
    for name in draw(st.lists(st.sampled_from(["image", "type", "subfolder", "overwrite", "x"]), max_size=4)):
        odd = draw(st.sampled_from(_ODD)).encode("utf-8", "replace")
        file = b'; filename="' + odd + b'"' if draw(st.booleans()) else b""
        value = b"1" if name == "overwrite" else draw(st.sampled_from(_VALUES)).encode()
        parts.append(
            b'--b\r\nContent-Disposition: form-data; name="' + name.encode() + b'"' + file + b"\r\n\r\n" + value
        )
    kind = draw(
        st.sampled_from(["multipart/form-data; boundary=b"] * 6 + ["multipart/form-data", "x", "", "text/plain"])
    )
    end = draw(st.sampled_from([b"\r\n--b--\r\n"] * 4 + [b"", b"--"]))
    return b"\r\n".join(parts) + end, {"Content_Type": kind}


@st.composite
def requests(draw: st.DrawFn) -> Drawn:
    """Any request."""
    headers: dict[str, str] = {}
    if draw(st.integers(0, 9)) == 9:  # else nearly everything would be refused as another site's
        choices = {"Host": _HOSTS, "Origin": _ORIGINS, "Sec_Fetch_Site": _SITES}
        headers = {name: draw(st.sampled_from(each)) for name, each in choices.items()}
    query = "&".join(
        f"{name}={quote(value)}"
        for name, value in draw(
            st.dictionaries(st.sampled_from(_QUERIES), st.sampled_from(_VALUES), max_size=3)
        ).items()
    )
    method = draw(st.sampled_from(["POST", "POST", "POST", "GET", "GET", "OPTIONS", "HEAD", "PUT"]))
    if method != "POST":
        path = "/" + "/".join(draw(st.lists(st.sampled_from(_PARTS), min_size=1, max_size=4)))
        return Drawn(method, path, b"", query, headers)
    path = draw(st.sampled_from(["", "", "/api"])) + draw(st.sampled_from(_POSTS))
    if path.endswith("image"):
        body, more = draw(uploads())
        return Drawn(method, path, body, query, {**headers, **more})
    return Drawn(method, path, draw(bodies()), query, headers)
