"""Writes the bundled workflows in UI form and API form from one description of each.

``python -m scripts.workflows.build`` writes ``workflows/`` and ``workflows/api/``; ``--check`` only reports which
files differ. Needs only Python. ``scripts.pictures.thumbnails`` makes the thumbnails.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

from ..places import ROOT
from .families import FAMILY_WORKFLOWS
from .unets import WORKFLOWS

FOLDER = ROOT / "workflows"


@functools.cache
def rendered() -> dict[str, str]:
    """The files that belong in ``workflows/``: relative path -> text."""
    texts: dict[str, str] = {}
    for build in (*WORKFLOWS, *FAMILY_WORKFLOWS):
        graph = build()
        texts[f"{graph.template}.json"] = _text(graph.ui())
        texts[f"api/{graph.name}.json"] = _text(graph.api())
    return texts


def differing(folder: Path = FOLDER) -> list[str]:
    """Files in ``folder`` that are missing, differ from ``rendered()``, or belong to no workflow."""
    wanted = rendered()
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*.json")}
    return sorted(
        name
        for name in found | set(wanted)
        if name not in found or (folder / name).read_text("utf-8") != wanted.get(name)
    )


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns 1 if ``--check`` finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, report which files differ")
    if parser.parse_args(arguments).check:
        names = differing()
        for name in names:
            print(f"workflows/{name} differs: run python -m scripts.workflows.build")
        return 1 if names else 0
    for name, text in rendered().items():
        path = FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8", newline="\n")
        print(f"workflows/{name}")
    return 0


def _text(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.exit(main())
