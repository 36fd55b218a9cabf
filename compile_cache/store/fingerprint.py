"""What a compiled artifact depends on besides its inputs: the environment it was built in and the model's structure."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from ..keys import Component, differing, digest

# Raise it whenever the meaning of a key or of a stored artifact changes.
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class EnvironmentFingerprint:
    """Where compiled code is valid. Paths, times and names of machines are no part of it."""

    torch: str
    triton: str
    python: str  # major.minor: generated code is Python
    platform: str  # operating system and machine type
    device: str  # GPU name and architecture, or the CPU's vector instructions
    precision: str  # flags that change the numbers: TF32, reduced-precision reductions
    settings: str  # of the compiler
    source: str  # digest of the code that regions are traced from, and of the code that traces them
    format: int = FORMAT_VERSION

    def components(self) -> list[Component]:
        return [(part.name, getattr(self, part.name)) for part in fields(self)]

    def digest(self) -> str:
        return digest(tuple(self.components()))

    def difference(self, other: EnvironmentFingerprint) -> list[str]:
        """One sentence per component that differs, for a report to people."""
        return [f"{name}: {a} here, {b} there" for name, a, b in differing(self.components(), other.components())]


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """The structure of a model: its classes, parameters and settings, never its weights' values or its file."""

    name: str
    structure: str  # digest over (module path, class, parameter shapes and dtypes, settings)
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", digest((self.name, self.structure)))
