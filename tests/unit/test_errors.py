"""Errors: two families, each message names what failed and what to do."""

from __future__ import annotations

import pytest

from compile_cache.errors import (
    BypassCode,
    UnknownBackendError,
    first_line,
)

# `GET /resolute/cache` counts bypasses by these codes; dashboards and the sidebar read them.
PUBLISHED_CODES = {
    "observed_input",
    "patched_block",
    "replaced_forward",
    "streamed_weights",
    "left_out",
    "no_regions",
    "compile_failed",
    "capture_failed",
    "out_of_memory",
    "core_compiler",
    "gradient",
}


def test_an_unknown_backend_names_itself_and_the_choices() -> None:
    text = str(UnknownBackendError("tensorrt", ["auto", "eager"]))
    assert text == "There is no backend 'tensorrt'. Choose one of: auto, eager."


@pytest.mark.parametrize(
    ("text", "line"), [("one", "one"), ("\n\n one\ntwo", "one"), ("", "no message"), (" \n ", "no message")]
)
def test_the_first_line_of_an_error_is_never_empty(text: str, line: str) -> None:
    assert first_line(RuntimeError(text)) == line


def test_the_published_codes_stay() -> None:
    assert {code.value for code in BypassCode} >= PUBLISHED_CODES
