"""The setup that every command starts with: ComfyUI checkouts, then the environment."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import as_command
from ..places import ROOT
from . import comfyui, environment


@dataclass(frozen=True, slots=True)
class Setup:
    """A ready interpreter, and the checkout of the target version."""

    python: Path
    comfyui: Path


def prepare(versions: Sequence[str] = (comfyui.TARGET,), say: Callable[[str], None] | None = None) -> Setup:
    """Set up what is missing and report it; takes a fraction of a second if everything is ready.

    Always includes the target version, because the environment has its requirements.
    """
    say = say or _say
    environment.check_python(sys.version_info[:2])
    target, *_ = [comfyui.ensure(ROOT, version, say) for version in dict.fromkeys((comfyui.TARGET, *versions))]
    return Setup(environment.ensure(ROOT, target, say), target)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    # For shell scripts: progress goes to stderr, only the interpreter's path to stdout.
    def _main() -> int:
        print(prepare(say=lambda text: print(text, file=sys.stderr, flush=True)).python)
        return 0

    sys.exit(as_command(_main))
