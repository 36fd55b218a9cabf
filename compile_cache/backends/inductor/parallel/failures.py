"""Why no worker compiled a job."""

from __future__ import annotations


class NotCompiledError(RuntimeError):
    """No worker compiled a job."""


class KilledError(NotCompiledError):
    """The process that had the job ended, by its fault or because the system killed it."""


class OtherEnvironmentError(NotCompiledError):
    """The process cannot take on the settings that this one has, so its code would be other code."""


class HungError(NotCompiledError):
    """The process that had the job hung, and was ended."""


class NoWorkersError(NotCompiledError):
    """No process that compiles can be started."""


class NeedsGpuError(NotCompiledError):
    """The compile asked the GPU for something that its description does not tell."""
