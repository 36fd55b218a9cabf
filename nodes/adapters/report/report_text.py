"""The cache's report as text for a bug report."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ....compile_cache.calls import report_rows
from ..comfyui import version

_RUNS_IN_REPORT = 20


def report_text(data: dict[str, Any], runs: list[dict[str, Any]], settings: dict[str, str]) -> str:
    """The table with the machine before it and the latest runs after it: what a report of a problem needs.

    settings: variables that are set, in the environment or in ComfyUI's dialog.
    """
    python = sys.version.split()[0]
    lines = [
        f"Resolute {version.of_this_pack()}, ComfyUI {version.of_comfyui()}, torch {torch.__version__}, "
        f"Python {python}, {sys.platform}, on {data['device']['name']}",
        "settings: " + (", ".join(f"{name}={value}" for name, value in sorted(settings.items())) or "all at default"),
        "",
        report_rows.report(data),
        "",
    ]
    for run in runs[-_RUNS_IN_REPORT:]:
        lines.append(f"{run['model']} {run['role']}: {run['status']}".replace("\n", "; "))
        lines += [f"  {reason}" for reason in run["reasons"]]
    return "\n".join(lines)
