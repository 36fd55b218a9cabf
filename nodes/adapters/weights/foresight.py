"""The time inputs of a sampling run's other noise levels, before their steps come.

A prologue of the time (see `split_blocks`) is computed for all noise levels while its weights are on the device, so it
needs the inputs that blocks will get. The model makes them from the time outside its blocks. So the model's own forward
runs once for each other level, until it calls its first block, and goes no further.

What was foreseen wrongly is never found, since results are kept by the values of their inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import comfy.model_management
import torch

from ....compile_cache.regions.dependence import TIME
from ....compile_cache.regions.kept_results import KeptResults
from ....compile_cache.regions.site import RegionSite

logger = logging.getLogger(__name__)

Forwards = Callable[[], Iterable[Callable[[], Any]]]
_MOST_LOOKS = 16  # of a run: each conditioning and batch needs one


class _FirstBlockReached(BaseException):
    """Ends a forward. Not an Exception, which a model's code may handle."""


class Foresight:
    """Of one model. Not thread-safe: callers hold the cache's lock."""

    def __init__(self, kept: KeptResults) -> None:
        self._kept = kept
        self._offer: Forwards | None = None
        self._looks = 0
        self._now: list[torch.Tensor] = []
        self._others: list[list[torch.Tensor]] = []
        self._noted: list[list[torch.Tensor]] | None = None

    @contextmanager
    def offered(self, forwards: Forwards) -> Iterator[None]:
        """Inside, a call of the model runs. forwards: the same call at each other noise level of the run."""
        self._offer = forwards
        try:
            yield
        finally:
            self._offer = None

    def forget(self) -> None:
        """The run is over."""
        self._looks = 0
        self._now, self._others = [], []

    @property
    def is_noting(self) -> bool:
        """A forward runs only to show its time inputs: its first block must call `note`."""
        return self._noted is not None

    def note(self, site: RegionSite, tensors: Sequence[torch.Tensor]) -> NoReturn:
        """The forward reached a block with these inputs. It ends here."""
        assert self._noted is not None
        self._noted.append(_times(site, tensors))
        raise _FirstBlockReached

    def others(
        self, site: RegionSite, tensors: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]
    ) -> list[list[torch.Tensor]]:
        """For each other noise level the inputs that a prologue gets there in place of `wanted`; empty if unknown.

        tensors: the inputs of the block in the present call. wanted: those of the prologue.
        """
        now = _times(site, tensors)
        if not all(any(tensor is each for each in self._now) for tensor in now):
            self._look(now)
        places = [next((n for n, each in enumerate(self._now) if each is tensor), -1) for tensor in wanted]
        # A tensor without elements only says how large something is, and that is the same in all steps.
        if any(place < 0 and tensor.numel() for place, tensor in zip(places, wanted, strict=True)):
            return []
        return [
            [tensor if place < 0 else level[place] for place, tensor in zip(places, wanted, strict=True)]
            for level in self._others
        ]

    def _look(self, now: list[torch.Tensor]) -> None:
        self._now, self._others = now, []
        if self._offer is None or self._looks >= _MOST_LOOKS:
            return
        self._looks += 1
        others = []
        try:
            for forward in self._offer():
                found = self._inputs_in(forward)
                if not _are_alike(found, now):
                    return
                others.append(found)
        except comfy.model_management.InterruptProcessingException:
            raise
        except Exception as error:  # noqa: BLE001 (the results are computed when they are needed)
            logger.debug("Resolute: no noise levels ahead: %s", error)
            return
        for each in others:
            self._kept.remember(each)
        self._others = others

    def _inputs_in(self, forward: Callable[[], Any]) -> list[torch.Tensor]:
        noted: list[list[torch.Tensor]] = []
        self._noted = noted
        try:
            forward()
        except _FirstBlockReached:
            pass
        finally:
            self._noted = None
        return noted[0] if noted else []


def _times(site: RegionSite, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor, source in zip(tensors, site.steady, strict=False) if source == TIME]


def _are_alike(found: Sequence[torch.Tensor], now: Sequence[torch.Tensor]) -> bool:
    return len(found) == len(now) > 0 and all(
        (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device) for a, b in zip(found, now, strict=True)
    )
