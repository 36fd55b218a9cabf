"""What one decision of the fleet's router costs, at 2, 20 and 200 replicas that are only numbers. No Ray, no ComfyUI.

`python -m benchmarks.routing_cost` prints the median and the 95th percentile in microseconds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from scripts.fleet_serving.ranking import Candidate, rank

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
    argparse.ArgumentParser(prog="python -m benchmarks.routing_cost", description=__doc__).parse_args()
    print("| replicas | median, us | 95th percentile, us |\n|---|---|---|")
    for count in (2, 20, 200):
        chooser, times = random.Random(count), []
        fleet = candidates(count, chooser)
        for _ in range(DECISIONS):
            shape = f"{chooser.randrange(6):012d} {64 * chooser.randrange(8, 18)}x1024x1"
            need = {"shapes": [shape], "structures": ["s"], "files": [shape[:12]]}
            started = time.perf_counter()
            rank(fleet, need, 4)
            times.append(time.perf_counter() - started)
        times.sort()
        print(f"| {count} | {statistics.median(times) * 1e6:.0f} | {times[int(0.95 * len(times))] * 1e6:.0f} |")


if __name__ == "__main__":
    main()
