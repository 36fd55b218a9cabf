"""Limits on the JSON of a request. Anyone who reaches ComfyUI's port can send one, so its size and content are checked
before anything else reads it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, NoReturn

from ....compile_cache.errors import UserError, excerpt

MAX_BODY = 16 << 20  # bytes; workflows have thousands, and some embed images as text
MAX_SMALL_BODY = 64 << 10  # bytes, where only a client_id is read
MAX_VALUES = 200_000  # in the whole request; a node has about ten
MAX_ENTRIES = 10_000  # of one list or object
MAX_NODES = 2_000  # of a workflow
MAX_DEPTH = 64  # lists and objects inside each other
MAX_NAME = 1_000  # characters of an object's key
MAX_FIELD = 10_000  # characters of a plan's field
MAX_NUMBER = 2**64  # seeds go up to it


_MAX_DIGITS = 40


class RequestTooLargeError(UserError):
    """The body of a request has too many bytes."""

    def __init__(self, limit: int) -> None:
        size = f"{limit >> 20} MiB" if limit >> 20 else f"{limit >> 10} KiB"
        remedy = "Send pictures as files (LoadImage), not inside the workflow."
        if limit < MAX_BODY:
            remedy = 'Send nothing, or {"client_id": ...}.'
        super().__init__(f"The request is larger than {size}. {remedy}")


def parse_body(content: bytes) -> dict[str, Any]:
    """The JSON object in a request's body. Raises UserError if it is not one, or breaks a limit of this module."""
    # Counted before parsing: each empty list takes 28 times as much memory as its text.
    if sum(content.count(mark) for mark in (b",", b"[", b"{")) > 2 * MAX_VALUES:
        raise _too_many_values()
    try:
        body = json.loads(content, parse_constant=_refuse_constant, parse_int=_parse_int)
    except UserError:
        raise
    except (ValueError, RecursionError):
        raise UserError("The request is not valid JSON, or it is nested too deeply.") from None
    if not isinstance(body, dict):
        raise UserError('The request must be a JSON object, for example {"prompt": ...}.')
    for count, value in enumerate(_values(body)):
        if count > MAX_VALUES:
            raise _too_many_values()
        _check_number(value)
    client = body.get("client_id", "")
    if isinstance(client, str) and len(client) > MAX_NAME:
        raise UserError(f'"client_id" has {len(client)} characters, and may have {MAX_NAME}. Send a UUID.')
    return body


def _values(body: dict[str, Any]) -> Iterator[Any]:
    """Every value in the body, level by level, because recursion into a deep body would overflow Python's stack."""
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        inside: list[Any] = []
        for each in level:
            yield each
            if isinstance(each, (dict, list)):
                _check_entries(each)
                inside += each.values() if isinstance(each, dict) else each
        if not inside:
            return
        level = inside
    raise UserError(f"The request is nested more than {MAX_DEPTH} levels deep. A workflow in API form has under ten.")


def _check_entries(holder: dict[str, Any] | list[Any]) -> None:
    if len(holder) > MAX_ENTRIES:
        raise UserError(
            f"A list or object of the request has {len(holder)} entries, and may have {MAX_ENTRIES}. Send less at once."
        )
    if isinstance(holder, dict):
        longest = max(holder, key=len, default="")
        if len(longest) > MAX_NAME:
            raise UserError(
                f"The name '{excerpt(longest)}' has {len(longest)} characters, and may have {MAX_NAME}. Shorten it."
            )


def _check_number(value: Any) -> None:
    if isinstance(value, (int, float)) and not (math.isfinite(value) and abs(value) <= MAX_NUMBER):
        raise UserError(f"{excerpt(value)} is too large a number. Numbers may go up to 2**64.")


def _parse_int(text: str) -> int:
    if len(text) > _MAX_DIGITS:  # Python parses long numbers slowly, and refuses more than 4,300 digits
        raise UserError(f"{excerpt(text)} is too large a number. Numbers may go up to 2**64.")
    return int(text)


def _refuse_constant(name: str) -> NoReturn:
    raise UserError(f"The request contains {name}, which is not a number. Send finite numbers.")


def _too_many_values() -> UserError:
    return UserError(f"The request has more than {MAX_VALUES} values. Send a smaller workflow.")
