"""Errors: two families, each message names what failed and what to do."""

from __future__ import annotations

import pytest

from compile_cache.errors import (
    BackendUnavailableError,
    BypassCode,
    BypassReason,
    RegionCompileError,
    UnknownBackendError,
    UserError,
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


@pytest.mark.parametrize("kind", [UnknownBackendError, BackendUnavailableError])
def test_an_error_that_the_user_can_fix_is_a_user_error(kind: type[Exception]) -> None:
    assert issubclass(kind, UserError)


def test_an_unknown_backend_names_itself_and_the_choices() -> None:
    text = str(UnknownBackendError("tensorrt", ["auto", "eager"]))
    assert text == "There is no backend 'tensorrt'. Choose one of: auto, eager."


def test_an_unavailable_backend_names_itself_the_reason_and_the_remedy() -> None:
    text = str(BackendUnavailableError("inductor", "Triton is not installed", "Install 'triton'."))
    assert text == "Backend 'inductor' cannot run here: Triton is not installed. Install 'triton'."


def test_a_compile_error_names_the_region_and_the_first_line_of_its_cause() -> None:
    cause = ValueError("bad stride\nand pages of\ntraceback")
    assert str(RegionCompileError("ResBlock", cause)) == "ResBlock: ValueError: bad stride"


@pytest.mark.parametrize(
    ("text", "line"), [("one", "one"), ("\n\n one\ntwo", "one"), ("", "no message"), (" \n ", "no message")]
)
def test_the_first_line_of_an_error_is_never_empty(text: str, line: str) -> None:
    assert first_line(RuntimeError(text)) == line


def test_the_published_codes_stay() -> None:
    assert {code.value for code in BypassCode} >= PUBLISHED_CODES


def test_a_reason_reads_as_code_and_sentence() -> None:
    assert str(BypassReason(BypassCode.GRADIENT, "gradients are on")) == "gradient: gradients are on"


def test_reasons_of_one_code_and_detail_are_one_reason() -> None:
    reasons = {BypassReason(BypassCode.NO_REGIONS, detail) for detail in ("a", "a", "b")}
    assert len(reasons) == 2
