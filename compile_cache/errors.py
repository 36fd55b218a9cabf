"""Errors, and the reasons why a call runs without a graph.

There are two families. A `UserError` stops the prompt and its message names the remedy. An `InternalError` is our own
failure: we catch it, count it, report the reason, and run the original forward instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ResoluteError(Exception):
    """Base class of every error of this package.

    Users see "resolute.UserError": ComfyUI puts the class and its module in front of each message, and the real module
    path begins with the pack's folder.
    """

    __module__ = "resolute"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__module__ = ResoluteError.__module__


class UserError(ResoluteError):
    """An input or setting is wrong; the message says what to do instead."""


class UnknownBackendError(UserError):
    def __init__(self, name: str, known: list[str]) -> None:
        super().__init__(f"There is no backend '{excerpt(name)}'. Choose one of: {', '.join(known)}.")


class BackendUnavailableError(UserError):
    def __init__(self, name: str, reason: str, remedy: str) -> None:
        super().__init__(f"Backend '{excerpt(name)}' cannot run here: {reason}. {remedy}")


class InternalError(ResoluteError):
    """Our own failure. The user sees a bypass with its reason, never this error."""


class NotComparedError(InternalError):
    """This call's values cannot verify compiled code against eager, so the code does not run. A later call may."""


class StillMissingError(InternalError):
    """No failure: the code of a block's first share is still being compiled. Run the whole block's original, which
    costs less host time than its shares.
    """


class DonatedInputsError(InternalError):
    """Compiled code failed after it had freed inputs, so the original cannot run in its place. The region is refused
    from now on; the caller can repeat the whole call.
    """


class CaptureError(InternalError):
    """A graph could not be captured; the cause is chained."""


class OverBudgetError(CaptureError):
    """A capture would exceed its memory limit. `bytes`: the memory that it needs."""

    def __init__(self, needed: int) -> None:
        super().__init__(f"a capture would take {needed >> 20} MiB")
        self.bytes = needed


class NoGainError(CaptureError):
    """A capture would gain nothing, because the GPU is busy all the time even without one."""

    def __init__(self, host_share: float) -> None:
        super().__init__(f"the host launches the call in {host_share:.0%} of the time that the GPU takes for it")
        self.host_share = host_share


class BypassCode(str, Enum):
    """Why a call, or one of its blocks, ran without a graph. The values are part of the HTTP interface."""

    OBSERVED_INPUT = "observed_input"  # the call has an unrecognised input that may change the computation
    PATCHED_BLOCK = "patched_block"  # another node's patch runs inside the block
    REPLACED_FORWARD = "replaced_forward"  # another pack replaced the block's forward, or a function that it calls
    FOREIGN_MODEL = "foreign_model"  # another pack wrote a class of the model
    UNREADABLE_WEIGHTS = "unreadable_weights"  # a weight is not a plain tensor, so a change to it may go unnoticed
    STREAMED_WEIGHTS = "streamed_weights"  # the weights are not resident on the GPU (low VRAM, DynamicVRAM)
    LEFT_OUT = "left_out"  # the user left blocks out of compiling
    NO_REGIONS = "no_regions"  # the model has no block of a supported family
    COMPILE_FAILED = "compile_failed"
    CAPTURE_FAILED = "capture_failed"
    OUT_OF_MEMORY = "out_of_memory"
    OVER_BUDGET = "over_budget"  # a capture would take more memory than the budget has
    CORE_COMPILER = "core_compiler"  # ComfyUI's own compiler handles the call
    NOT_FASTER = "not_faster"  # the compiled call was not faster on this device, or it is being compared with eager
    GRADIENT = "gradient"  # training: a graph has no backward pass


@dataclass(frozen=True, slots=True)
class BypassReason:
    """`code` is counted by the statistics, `detail` is a sentence for the user."""

    code: BypassCode
    detail: str

    def __str__(self) -> str:
        return f"{self.code.value}: {self.detail}"


def excerpt(value: object, length: int = 60) -> str:
    """Shorten an untrusted value for a message: at most `length` characters, "?" for each unprintable one."""
    text = value if isinstance(value, str) else repr(value)
    shown = text if len(text) <= length else f"{text[: length - 1]}…"
    return "".join(each if each.isprintable() else "?" for each in shown)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, because torch's messages can be pages long."""
    text = str(error).strip()
    return text.splitlines()[0] if text else "no message"
