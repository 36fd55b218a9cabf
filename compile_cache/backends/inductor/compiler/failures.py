"""Why no worker compiled a job."""

from __future__ import annotations


class NotCompiledError(RuntimeError):
    """No worker compiled a job."""


class KilledError(NotCompiledError):
    """The process that compiled the job ended: the job crashed it, or the system killed it."""


class OtherEnvironmentError(NotCompiledError):
    """The worker cannot apply this process's settings, so it would generate different code."""


class HungError(NotCompiledError):
    """The process that compiled the job hung, and was ended."""


class NoWorkersError(NotCompiledError):
    """No worker process can be started."""


class NeedsGpuError(NotCompiledError):
    """The compile needs the GPU itself: its description does not suffice."""
