"""Searches for a failing sequence: a fixed set in CI, any number with `scripts/fuzz`.

No failure is lost: hypothesis shortens a failing sequence by playing parts of it on the same server, which finds
nothing if the failure depends on earlier sequences. So the first failure is written to a file immediately, together
with the sequences before it; the shortest one is written too.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, reject, seed, settings
from hypothesis.errors import HypothesisException

from .events import Event, sequences
from .player import Player, Unexpected

_AT_ONCE = 50  # sequences per run of hypothesis; the next run has the next seed
_MOST_FAILURES = 5
_FEWEST_CHANGES = 4
_EARLIER = 20  # number of earlier sequences that are written with a failing one


@dataclass(frozen=True)
class Plan:
    """Limits of the search, and the folder for failures. Without a seed the search is the same each time.

    sequences, seconds: the search stops at the first of the two. replay: play this failure's file instead.
    shorten: look for the shortest sequence that fails, which takes minutes.
    """

    sequences: int = 4
    seed: int | None = None
    seconds: float | None = None
    replay: Path | None = None
    failures: Path | None = None
    shorten: bool = True

    @classmethod
    def from_environment(cls) -> Plan:
        """The plan in the variables of `scripts/fuzz`; without them, CI's plan."""
        variables = os.environ
        seconds, seed_, replay = (variables.get(f"RESOLUTE_FUZZ_{name}") for name in ("SECONDS", "SEED", "REPLAY"))
        failures = variables.get("RESOLUTE_FUZZ_FAILURES")
        return cls(
            sequences=int(variables.get("RESOLUTE_FUZZ_SEQUENCES", cls.sequences)),
            seed=int(seed_) if seed_ else None,
            seconds=float(seconds) if seconds else None,
            replay=Path(replay) if replay else None,
            failures=Path(failures) if failures else None,
            shorten=variables.get("RESOLUTE_FUZZ_SHORTEN") != "0",
        )


class Search:
    """Plays sequences and records them for a failure's file."""

    def __init__(self, player: Player, folder: Path, patches: Sequence[str]) -> None:
        self._player = player
        self._folder = folder
        self._patches = patches
        self._diary: deque[list[Event]] = deque(maxlen=_EARLIER)
        self._changes: deque[Counter[str]] = deque(maxlen=_AT_ONCE)
        self._failure = ""  # text of the latest failure of this run of hypothesis
        self._end = math.inf

    @property
    def _is_late(self) -> bool:
        return time.monotonic() > self._end

    def run(self, plan: Plan) -> list[str]:
        """Run the search. Returns the failures as text, each with its file for `scripts/fuzz --replay`."""
        found: list[str] = []
        tally = self._player.tally
        if plan.seconds is not None:
            self._end = time.monotonic() + plan.seconds
        number = 0
        while not self._is_late and tally.sequences < plan.sequences and len(found) < _MOST_FAILURES:
            count = min(_AT_ONCE, plan.sequences - tally.sequences)
            name = "ci" if plan.seed is None else str(plan.seed + number)
            failure = self._some(count, None if plan.seed is None else plan.seed + number, name, plan.shorten)
            if failure is not None:
                found.append(failure)
                tally.failures += 1
                self._record()
            if plan.seed is None:
                break
            number += 1
        return found

    def _record(self) -> None:
        """Write what was counted so far, because a long search may be interrupted."""
        (self._folder / "tally.json").write_text(json.dumps(self._player.tally.as_json(), indent=1) + "\n", "utf-8")

    def _some(self, count: int, start: int | None, name: str, shorten: bool) -> str | None:
        @settings(
            max_examples=count,
            derandomize=start is None,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink) if shorten else (Phase.generate,),
            report_multiple_bugs=False,
            print_blob=False,
        )
        @given(sequence=sequences(self._patches))
        def play(sequence: list[Event]) -> None:
            if not self._failure and (self._is_late or not self._is_news(sequence)):
                reject()
            self.play(sequence, name)

        self._failure = ""
        try:
            (play if start is None else seed(start)(play))()
        except Exception as error:  # noqa: BLE001 (it becomes part of the report)
            # The shortest sequence was played last. If it passed then, hypothesis reports that in its own error.
            flaky = f"{type(error).__name__}: {error}\n" if isinstance(error, HypothesisException) else ""
            return flaky + self._failure
        return None

    def _is_news(self, sequence: Sequence[Event]) -> bool:
        """Whether a sequence has enough changes that earlier ones did not have.

        Hypothesis makes up to five near copies of each example. That is useful for examples of microseconds; these take
        seconds, so skip the copies. After a failure hypothesis must get every sequence that it wants.
        """
        changes = Counter(repr(event[1:]) for event in sequence if event[0] in ("set", "both"))
        changes += Counter(repr(field) for event in sequence if event[0] == "open" for field in event[1].items())
        shared = max((sum((changes & earlier).values()) for earlier in self._changes), default=0)
        if sum(changes.values()) < _FEWEST_CHANGES or shared > sum(changes.values()) / 2:
            return False
        self._changes.append(changes)
        return True

    def play(self, sequence: Sequence[Event], name: str) -> None:
        """Play one sequence. If it fails, write a file for replaying it and raise the failure."""
        earlier = list(self._diary)
        self._diary.append(list(sequence))
        try:
            self._player.play(sequence)
            self._record()
        except Exception as error:
            record: dict[str, Any] = {
                "error": f"{type(error).__name__}: {error}",
                "sequence": list(sequence),
                "prompts": error.prompts if isinstance(error, Unexpected) else {},
                "earlier": earlier,
            }
            first = self._folder / f"{name}-first.json"
            path = self._folder / f"{name}.json" if first.exists() else first
            path.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
            lines = [str(record["error"]), *(f"    {event}" for event in sequence)]
            lines += [f"{title}: {json.dumps(prompt)}" for title, prompt in record["prompts"].items()]
            self._failure = "\n".join([*lines, f"To play it again: scripts/fuzz --replay {path}"])
            raise

    def replay(self, path: Path) -> None:
        """Play a failure's sequence. If it passes, play it again after the sequences before it."""
        record: dict[str, Any] = json.loads(path.read_text("utf-8"))
        self._player.play(record["sequence"])
        for sequence in [*record.get("earlier", []), record["sequence"]]:
            self._player.play(sequence)
