"""Make the captures of a cache, and remember which calls are not to be captured again."""

from __future__ import annotations

import logging
from typing import Any

import torch

from ..backends.base import Call, CaptureFacts, Program
from ..backends.cuda_graphs.memory import release_graph_memory
from ..backends.cuda_graphs.run_cost import RunCost
from ..errors import BypassCode, BypassReason, NoGainError, OverBudgetError
from ..keys import CaptureKey, GraphKey
from ..stats import Stats
from ..torch_facts.out_of_memory import is_out_of_memory
from ..torch_facts.private_names import pytree
from .captures import Captures
from .no_gain import LEAST_HOST_SHARE, CallsWithoutGain

logger = logging.getLogger(__name__)


class CaptureMaker:
    """Puts captures into `captures`, within its budget. GraphCache's lock guards it.

    without_gain: the calls that it measured, and makes no capture of.
    """

    def __init__(self, captures: Captures, stats: Stats, without_gain: CallsWithoutGain, spare: int = 0) -> None:
        """spare: see `CacheConfig.spare_bytes`."""
        self._captures = captures
        self.without_gain = without_gain
        self._spare = spare
        self._stats = stats
        self._needed: dict[tuple[str, int, GraphKey], int] = {}  # bytes that a refused capture would work in

    def make(self, program: Program, call: Call, key: CaptureKey, result: Any, why: str, cost: RunCost) -> float:
        """Capture a call whose run gave `result`. cost: of that run. Returns the seconds that the capture took.

        A key that fails is not tried again, one that fails for lack of memory not until there is more.
        """
        with self._stats.stalling():  # also for a capture that fails, after its rehearsal
            return self._make(program, call, key, result, why, cost)

    def _make(self, program: Program, call: Call, key: CaptureKey, result: Any, why: str, cost: RunCost) -> float:
        started = self._stats.clock()
        self._captures.drop_stale(key.owner, call.epoch)
        room = self._captures.room_to_work_in(_bytes_of(call, result), call.device)
        if self._needed.get((key.device, key.owner, key.graph), 0) > room:  # measured before, and not worth a rehearsal
            self._refuse(key, self._needed[key.device, key.owner, key.graph])
            return 0.0
        shared = self._captures.shared_bytes()
        call.progress.raise_if_cancelled()
        try:
            known = CaptureFacts(cost.bytes, room, self._spare, cost.host_share(), LEAST_HOST_SHARE)
            graph = program.capture(call, result, known)
        except NoGainError as error:
            self.without_gain.add(key)
            logger.info("Resolute: %s is not captured, since that would gain nothing: %s", key.shape, error)
            return 0.0
        except OverBudgetError as error:
            self._needed[key.device, key.owner, key.graph] = error.bytes
            self._refuse(key, error.bytes)
            return 0.0
        except Exception as error:
            if isinstance(error.__cause__, call.progress.cancellations):
                raise error.__cause__ from None
            if isinstance(error, call.progress.cancellations):
                raise
            logger.debug("Resolute: the capture of %s failed", key.shape, exc_info=error)
            release_graph_memory()
            short = is_out_of_memory(error) or is_out_of_memory(error.__cause__)
            self.block(key, BypassCode.CAPTURE_FAILED, str(error), passes=short)
            return 0.0
        seconds = self._stats.clock() - started
        self._stats.counters.captures += 1
        self.without_gain.remove(key)
        self._stats.event("capture", f"{key.shape}: {why}", seconds)
        grown = self._captures.shared_bytes()
        too_large = grown > max(self._captures.budget, shared)  # its memory grew by more than was measured
        if too_large or not self._captures.put(key, graph, graph.bytes):
            size = graph.bytes
            graph.close()
            release_graph_memory()
            self._refuse(key, size + grown - shared)
        elif not program.capabilities.returns_memory:
            self._captures.pin(key)  # for good: evicting it would free nothing
        self._stats.counters.evictions = self._captures.evictions
        return seconds

    def retry_all(self, measured: bool) -> None:
        """Memory was freed: let every call be captured again. measured: also those that gained nothing from it."""
        self._captures.retry_all()
        self._needed.clear()
        if measured:
            self.without_gain.measure_again()

    def forget(self, owner: int) -> None:
        """A module was garbage collected."""
        self.without_gain.forget(owner)
        self._needed = {place: size for place, size in self._needed.items() if place[1] != owner}

    def _refuse(self, key: CaptureKey, size: int) -> None:
        detail = (
            f"a capture of {key.shape} takes {size >> 20} MiB, more than the budget has beside the captures in use; "
        )
        detail += f"raise RESOLUTE_BUDGET_MB (now {self._captures.budget >> 20})"
        self.block(key, BypassCode.OVER_BUDGET, detail, passes=True)

    def block(self, key: CaptureKey, code: BypassCode, detail: str, passes: bool = False) -> None:
        """Do not capture calls of this key again, and count why. passes: only until there is more memory."""
        reason = BypassReason(code, detail)
        if passes:
            self._captures.latches.block(key, reason)
        else:
            self._captures.blockers[key] = reason
        self.count(reason)

    def count(self, reason: BypassReason) -> None:
        """Count a bypass, and log the first of its kind."""
        if self._stats.bypass(reason):
            logger.info("Resolute: %s", reason)


def _bytes_of(call: Call, result: Any) -> int:
    """Bytes of the buffers that a capture of this call will have."""
    leaves = (*call.tensors, *pytree.tree_leaves(result))
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
