"""The fields that the ingress reads from a request's body, each with its type. A wrong one is an answer of 400."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from .. import pack
from .http_form import ApiError

_PROMPT = {"extra_data": dict, "number": (int, float), "front": bool, "client_id": str}
_NAMES = {dict: "an object", (int, float): "a number", bool: "true or false", str: "a text"}


def field(body: Mapping[str, Any], name: str, kind: Any) -> Any:
    """A field of this type; None if it is missing or null. Raises ApiError."""
    value = body.get(name)
    is_wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
    if value is not None and is_wrong:
        raise _wrong(name, _NAMES[kind], value)
    return value


def texts(body: Mapping[str, Any], name: str) -> list[str] | None:
    """A field that is a list of texts; None if it is missing or null. Raises ApiError."""
    value = body.get(name)
    if value is not None and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
        raise _wrong(name, "a list of texts", value)
    return value


def prompt_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of `POST /prompt` for a replica, without fields that are null. Raises ApiError for a wrong one."""
    if not isinstance(body.get("prompt"), dict):
        raise ApiError(400, "no_prompt", "No prompt provided")
    for node in body["prompt"].values():
        if not isinstance(node, dict):
            raise _wrong("prompt", "a workflow in API form, an object for each node", node)
        field(node, "class_type", str)
        field(node, "inputs", dict)
    for name, kind in _PROMPT.items():
        field(body, name, kind)
    texts(body, "partial_execution_targets")
    return {name: value for name, value in body.items() if value is not None}


def checked_id(given: Any) -> str:
    """The prompt id that a client gave, or a new one for None. Raises ApiError."""
    if given is None:
        return str(uuid.uuid4())
    if not is_id(given):
        raise ApiError(400, "invalid_prompt_id", "prompt_id must be a valid UUID: lowercase, with hyphens.")
    return str(given)


def is_id(given: Any) -> bool:
    """True for a text that may be the id of a prompt."""
    try:
        return isinstance(given, str) and str(uuid.UUID(given)) == given
    except ValueError:
        return False


def _wrong(name: str, wanted: str, value: Any) -> ApiError:
    excerpt = pack.module("compile_cache.errors").excerpt
    return ApiError(400, "invalid_field", f'"{name}" must be {wanted}, not {excerpt(value)}.')
