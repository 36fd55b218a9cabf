"""Looks for a sequence that fails: a fixed set of them in CI, any number of them through `scripts/fuzz`.

Nothing that is found is lost: hypothesis shortens a failing sequence by playing parts of it on the same server, and
where the failure needs what came before, that finds nothing. So the first failure is written down at once, with the
sequences before it, and the shortest one beside it.
"""

from __future__ import annotations

import json
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

_AT_ONCE = 50  # sequences of one run of hypothesis; the next run has the next seed
_MOST_FAILURES = 5
_FEWEST_CHANGES = 4
_EARLIER = 20  # sequences before a failing one that are written down with it


@dataclass(frozen=True)
class Plan:
    """How long to look, and where to write failures. Without a seed it is the same search each time.

    sequences, minutes: whichever comes first. replay: a file of a failure, played in place of a search.
    """

    sequences: int = 30
    seed: int | None = None
    minutes: float | None = None
    replay: Path | None = None
    failures: Path | None = None

    @classmethod
    def from_environment(cls) -> Plan:
        """What `scripts/fuzz` asks for; CI's plan where it does not."""
        variables = os.environ
        minutes, seed_, replay = (variables.get(f"RESOLUTE_FUZZ_{name}") for name in ("MINUTES", "SEED", "REPLAY"))
        failures = variables.get("RESOLUTE_FUZZ_FAILURES")
        return cls(
            sequences=int(variables.get("RESOLUTE_FUZZ_SEQUENCES", cls.sequences)),
            seed=int(seed_) if seed_ else None,
            minutes=float(minutes) if minutes else None,
            replay=Path(replay) if replay else None,
            failures=Path(failures) if failures else None,
        )


class Search:
    """Plays sequences, and keeps a diary of them for the file of a failure."""

    def __init__(self, player: Player, folder: Path, patches: Sequence[str]) -> None:
        self._player = player
        self._folder = folder
        self._patches = patches
        self._diary: deque[list[Event]] = deque(maxlen=_EARLIER)
        self._changes: deque[Counter[str]] = deque(maxlen=_AT_ONCE)
        self._failure = ""  # the latest of this run of hypothesis, for people

    def run(self, plan: Plan) -> list[str]:
        """What failed, as text, each with the file that `scripts/fuzz --replay` takes."""
        found: list[str] = []
        begun, tally = time.monotonic(), self._player.tally
        number = 0
        while tally.sequences < plan.sequences and len(found) < _MOST_FAILURES:
            if plan.minutes is not None and time.monotonic() - begun > 60 * plan.minutes:
                break
            count = min(_AT_ONCE, plan.sequences - tally.sequences)
            name = "ci" if plan.seed is None else str(plan.seed + number)
            failure = self._some(count, None if plan.seed is None else plan.seed + number, name)
            if failure is not None:
                found.append(failure)
                tally.failures += 1
            if plan.seed is None:
                break
            number += 1
        return found

    def _some(self, count: int, start: int | None, name: str) -> str | None:
        @settings(
            max_examples=count,
            derandomize=start is None,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
            report_multiple_bugs=False,
            print_blob=False,
        )
        @given(sequence=sequences(self._patches))
        def play(sequence: list[Event]) -> None:
            if not self._failure and not self._is_news(sequence):
                reject()
            self.play(sequence, name)

        self._failure = ""
        try:
            (play if start is None else seed(start)(play))()
        except Exception as error:  # noqa: BLE001 (it becomes part of the report)
            # The shortest sequence was played last; where it passed then, hypothesis says so in its own error.
            flaky = f"{type(error).__name__}: {error}\n" if isinstance(error, HypothesisException) else ""
            return flaky + self._failure
        return None

    def _is_news(self, sequence: Sequence[Event]) -> bool:
        """Whether a sequence changes enough that earlier ones did not.

        Of each example hypothesis also makes up to five that are nearly the same. That finds more where an example
        costs microseconds; these cost seconds. Once something failed it must have all that it asks for.
        """
        changes = Counter(repr(event[1:]) for event in sequence if event[0] in ("set", "both"))
        changes += Counter(repr(field) for event in sequence if event[0] == "open" for field in event[1].items())
        most = max((sum((changes & earlier).values()) for earlier in self._changes), default=0)
        if sum(changes.values()) < _FEWEST_CHANGES or most > sum(changes.values()) / 2:
            return False
        self._changes.append(changes)
        return True

    def play(self, sequence: Sequence[Event], name: str) -> None:
        """Play one sequence; where it fails, write down how to play it again, and let the failure through."""
        earlier = list(self._diary)
        self._diary.append(list(sequence))
        try:
            self._player.play(sequence)
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
        """Play a failure's sequence; where it passes, once more after the sequences that came before it."""
        record: dict[str, Any] = json.loads(path.read_text("utf-8"))
        self._player.play(record["sequence"])
        for sequence in [*record.get("earlier", []), record["sequence"]]:
            self._player.play(sequence)
