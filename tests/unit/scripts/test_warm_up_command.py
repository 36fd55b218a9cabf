"""`scripts/warm-up` says in one sentence what is wrong, and what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scripts.places import ROOT
from scripts.ports import free_port


def test_without_a_server_it_says_how_to_name_one(tmp_path: Path) -> None:
    workflow = tmp_path / "workflow.json"
    workflow.write_text("{}", "utf-8")
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, str(ROOT / "scripts" / "warm-up"), str(workflow), "--server", url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {url} does not answer: ")
    assert done.stderr.endswith(". Start ComfyUI, or give its address with --server.\n")
