"""Measures one decision of the fleet's router at 2, 20 and 200 replicas that are only numbers. No Ray, no ComfyUI.

`python -m benchmarks.routing_cost [--out FILE]` prints the median and the 95th percentile, in microseconds of CPU time,
and writes them as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from pathlib import Path

from scripts.serving.ranking import Candidate, rank

SHAPES = 12  # that each replica has ready
DECISIONS = 2000


def candidates(count: int, chooser: random.Random) -> list[Candidate]:
    """Replicas with some of 60 shapes of six models, and up to four prompts each."""
    found = []
    for number in range(count):
        shapes = [f"{chooser.randrange(6):012d} {64 * chooser.randrange(8, 18)}x1024x1" for _ in range(SHAPES)]
        stats = {"shapes": shapes, "structures": ["s"], "files": [shapes[0][:12]], "ready": True}
        found.append(Candidate(f"replica-{number}", chooser.randrange(5), stats))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing_cost", description=__doc__)
    parser.add_argument("--out", type=Path)
    options, rows = parser.parse_args(), list[dict[str, float]]()
    print("| replicas | median, us | 95th percentile, us |\n|---|---|---|")
    for count in (2, 20, 200):
        chooser, times = random.Random(count), []
        fleet = candidates(count, chooser)
        for _ in range(DECISIONS):
            shape = f"{chooser.randrange(6):012d} {64 * chooser.randrange(8, 18)}x1024x1"
            need = {"shapes": [shape], "structures": ["s"], "files": [shape[:12]]}
            started = time.process_time()
            rank(fleet, need, 4)
            times.append(time.process_time() - started)
        times.sort()
        rows.append(
            {
                "replicas": count,
                "median_us": round(statistics.median(times) * 1e6, 1),
                "p95_us": round(times[int(0.95 * len(times))] * 1e6, 1),
            }
        )
        print(f"| {count} | {rows[-1]['median_us']:.0f} | {rows[-1]['p95_us']:.0f} |")
    if options.out is not None:
        machine = {"processors": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}
        found = {**machine, "decisions": DECISIONS, "shapes_of_each": SHAPES, "rows": rows}
        options.out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
