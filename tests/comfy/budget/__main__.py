"""Count the calls of the host's work in this process, and print the table beside the budget.

python -m tests.comfy.budget [--json]
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..in_process import load
from . import models, places

BUDGET = Path(__file__).parent / "calls.json"
COLLECTED, RUNS = "SDXL", 20


def counted(core: SimpleNamespace) -> dict[str, Any]:
    """models: the calls of each place, by model. growth: the same of fewer and of more modules, by their number.
    attributes: on how many modules core left each attribute. collections: how often Python collected all objects in
    RUNS runs of COLLECTED.
    """
    for name in models.SMALLER:  # what a process does once is no work of a model's
        places.measure(places.Host(core, name, **models.SMALLER[name][0]))
    found: dict[str, Any] = {"models": {}, "growth": {}, "attributes": {}}
    for name in models.MODELS:
        host = places.Host(core, name)
        found["models"][name] = places.measure(host)
        if name == COLLECTED:
            host.prepare()
            found["collections"] = places.collections_in_runs(host, RUNS)
        attributes = collections.Counter(each for module in host.network.modules() for each in vars(module))
        found["attributes"][name] = dict(attributes)
    for name, sizes in models.SMALLER.items():
        hosts = [places.Host(core, name, **changes) for changes in sizes]
        found["growth"][name] = [(len(list(host.network.modules())), places.measure(host)) for host in hosts]
    return found


def main() -> None:
    core = load()
    with places.without_gpu():
        found = counted(core)
    if "--json" in sys.argv:
        print(json.dumps(found))
        return
    if "--record" in sys.argv:
        BUDGET.write_text(json.dumps(found["models"], indent=4) + "\n", encoding="utf-8")
    budget = json.loads(BUDGET.read_text(encoding="utf-8"))
    print(f"{'calls of Python and C functions':40}{'now':>12}{'budget':>12}")
    for name, row in found["models"].items():
        for place, count in row.items():
            print(f"{name + ', ' + place:40}{count:12,}{budget[name][place]:12,}")


if __name__ == "__main__":
    main()
