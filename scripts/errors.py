"""Errors that a command shows as one sentence instead of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable


class SetupError(RuntimeError):
    """Setup failed; the message names the cause and the remedy."""


class ServerError(RuntimeError):
    """ComfyUI did not start, exited or does not answer; the message has the end of its log if there is one."""


class PromptError(RuntimeError):
    """ComfyUI refused a prompt or a node failed; the message names the node and the reason."""


def as_command(main: Callable[[], int]) -> int:
    """Run a command; an expected error becomes one sentence on stderr and exit code 1."""
    try:
        return main()
    except (SetupError, ServerError, PromptError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        return 130
