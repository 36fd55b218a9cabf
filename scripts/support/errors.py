"""Errors that a command shows as one sentence instead of a traceback."""

from __future__ import annotations


class SetupError(RuntimeError):
    """Set-up cannot go on; the message names what failed and the remedy."""


class ServerError(RuntimeError):
    """ComfyUI did not start, or ended; the message holds the end of its log."""


class PromptError(RuntimeError):
    """ComfyUI refused a prompt, or a node failed; the message says which and why."""
