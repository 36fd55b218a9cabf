"""The host's work has a budget: calls of Python and C functions, which are the same on a busy machine and a quiet one.

`calls.json` has it, for models at their real number of modules with everything that core's DynamicVRAM hangs on them.
`python -m tests.comfy.budget` prints it beside what the code needs now.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from ..in_process import ROOT
from .__main__ import BUDGET
from .models import MODELS, SMALLER

PLACES = (
    "a node, first for a model", "first call after a restart", "a replayed call", "a new size", "first call of a run",
    "a node again",
)  # fmt: skip
# Set by core's load, by its fill of pages, and by its pins of the host's memory.
OF_CORE = {
    "_v", "_v_signature", "_v_weight", "_pin_state", "_pins", "seed_key", "weight_function", "weight_lowvram_function",
}  # fmt: skip


@pytest.fixture(scope="module")
def counted() -> Any:
    """In a process of its own: what other tests did in this one would count."""
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "tests.comfy.budget", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("model", MODELS)
def test_a_place_makes_at_most_a_tenth_more_calls_than_its_budget(counted: Any, model: str, place: str) -> None:
    budget = json.loads(BUDGET.read_text(encoding="utf-8"))[model][place]
    assert counted["models"][model][place] <= 1.1 * budget, "python -m tests.comfy.budget prints all"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("model", SMALLER)
def test_calls_grow_no_faster_than_the_modules(counted: Any, model: str, place: str) -> None:
    (fewer, before), (more, after) = counted["growth"][model]
    assert more > 3 * fewer > 1500
    assert after[place] / before[place] < 1.25 * more / fewer


@pytest.mark.parametrize("model", MODELS)
def test_modules_carry_what_core_hangs_on_them(counted: Any, model: str) -> None:
    found = counted["attributes"][model]
    assert all(found.get(name, 0) > 250 for name in OF_CORE), {name: found.get(name, 0) for name in OF_CORE}


def test_no_collection_of_all_objects_stops_a_run(counted: Any) -> None:
    assert counted["collections"] == 0
