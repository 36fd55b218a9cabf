"""Errors, and the reasons for which a call runs without a graph.

Two families, because they are answered differently: a `UserError` stops the prompt with a sentence that names the
remedy; an `InternalError` is ours, is caught, counted and explained, and the original forward runs instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ResoluteError(Exception):
    """Everything that this package raises on its own."""


class UserError(ResoluteError):
    """The user asked for something that cannot be done; the message says what to do instead."""


class UnknownBackendError(UserError):
    def __init__(self, name: str, known: list[str]) -> None:
        super().__init__(f"There is no backend '{name}'. Choose one of: {', '.join(known)}.")


class BackendUnavailableError(UserError):
    def __init__(self, name: str, reason: str, remedy: str) -> None:
        super().__init__(f"Backend '{name}' cannot run here: {reason}. {remedy}")


class InternalError(ResoluteError):
    """A failure of ours: never shown as an error, always as a bypass with its reason."""


class RegionCompileError(InternalError):
    """A region could not be traced or compiled; `region` is its kind, the cause is chained."""

    def __init__(self, region: str, cause: BaseException) -> None:
        super().__init__(f"{region}: {type(cause).__name__}: {first_line(cause)}")


class CaptureError(InternalError):
    """A CUDA graph could not be captured; the cause is chained."""


class BypassCode(str, Enum):
    """Why a call, or a block of it, ran without a graph. The values are part of the HTTP interface."""

    OBSERVED_INPUT = "observed_input"  # something in the call changes the computation and is not understood
    PATCHED_BLOCK = "patched_block"  # another node's patch runs inside the block
    REPLACED_FORWARD = "replaced_forward"  # another pack replaced the block's forward
    STREAMED_WEIGHTS = "streamed_weights"  # weights are not resident (low VRAM, DynamicVRAM)
    NO_REGIONS = "no_regions"  # the model has no block that we know
    COMPILE_FAILED = "compile_failed"
    CAPTURE_FAILED = "capture_failed"
    OUT_OF_MEMORY = "out_of_memory"
    GRADIENT = "gradient"  # training: a graph has no backward pass


@dataclass(frozen=True, slots=True)
class BypassReason:
    """`code` is what gets counted, `detail` is the sentence that people read."""

    code: BypassCode
    detail: str

    def __str__(self) -> str:
        return f"{self.code.value}: {self.detail}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text: torch's own errors run over pages."""
    text = str(error).strip()
    return text.splitlines()[0] if text else "no message"
