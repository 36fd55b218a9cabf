"""The fingerprint of the environment, which compiled artifacts depend on."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..keys import Component, differing, digest

# Increase it whenever the meaning of a key or of a stored artifact changes.
# 3: the environment no longer has torch's flags; they are in the key of each region alone.
# 4: an artifact names the sizes at which its code was confirmed; a region's key has the
#    content of the code that its block reaches, and no longer its names alone.
# 5: a region's key has what the Python modules around its block hold; a setting counts by its content, a function too.
# 6: an artifact is one file.
# 7: an artifact names the sizes at which its code was confirmed, not their range, and says whether its block branches
#    on a size.
# 8: `source` covers our code only. A region's key covers core's code that its block reaches by names, and an artifact
#    names the applications in which its code was compared.
FORMAT_VERSION = 8


@dataclass(frozen=True, slots=True)
class EnvironmentFingerprint:
    """The environment that compiled code is valid in. Contains no paths, times or machine names."""

    torch: str
    triton: str
    python: str  # major.minor: generated code is Python
    platform: str  # operating system and machine type
    device: str  # GPU name and architecture, or the CPU's vector instructions
    settings: str  # compiler settings
    source: str  # digest of the code that traces regions and compiles them
    format: int = FORMAT_VERSION

    def components(self) -> list[Component]:
        return [(part.name, getattr(self, part.name)) for part in fields(self)]

    def digest(self) -> str:
        return digest(tuple(self.components()))

    def difference(self, other: EnvironmentFingerprint) -> list[str]:
        """One sentence per component that differs."""
        return [f"{name}: {a} here, {b} there" for name, a, b in differing(self.components(), other.components())]
