"""Compute the time inputs of a sampling run's other noise levels ahead of their steps.

A block's time prologue (see `split_blocks`) is computed for all noise levels while its weights are on the device, so it
needs the block's future inputs. The model computes them from the time outside its blocks. So the model's own forward
runs once for each other level and stops at its first block.

A wrong prediction is harmless: results are looked up by the values of their inputs, so it is never used.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import comfy.model_management
import torch

from ....compile_cache.backends.inductor.regions.prologue_cache import Content, Inputs, are_same, values_of
from ..comfyui.transformer_options import PREFETCH, SCHEDULE

logger = logging.getLogger(__name__)

Forwards = Callable[[], Iterable[Callable[[], Any]]]
_OPTIONS = "transformer_options"
_TIMES = ("timestep", "timesteps", "t")  # how core's models name the time
_MOST = 256  # noise levels of a run
_MOST_PROBES = 16  # per run: each conditioning and batch needs one


class _FirstBlockReached(BaseException):
    """Stops a forward. A BaseException, because a model's code may handle an Exception."""

    def __init__(self, times: Inputs) -> None:
        super().__init__()
        self.times = times


class TimestepLookahead:
    """Predicts the time inputs of one model's blocks. Not thread-safe: callers hold the cache's lock."""

    def __init__(self) -> None:
        self._forwards: Forwards | None = None
        self._probes = 0
        self._now: Inputs = ()
        self._other_times: dict[Content, Inputs] = {}
        self._is_probing = False  # a forward runs only to compute its times

    @contextmanager
    def with_forwards(self, forwards: Forwards) -> Iterator[None]:
        """Wraps a call of the model. forwards: yields the same call at each other noise level of the run."""
        self._forwards = forwards
        try:
            yield
        finally:
            self._forwards = None

    def forget(self) -> None:
        """The sampling run is over: drop its times."""
        self._probes, self._now, self._other_times = 0, (), {}

    def at_block(self, times: Inputs) -> None:
        """A forward reached a block with these times. Stops the forward if it runs only to compute them."""
        if self._is_probing:
            raise _FirstBlockReached(times)

    def other_times(self, times: Inputs) -> dict[Content, Inputs]:
        """The times that replace these at each other noise level, by their values; empty if unknown."""
        if not are_same(times, self._now):
            self._now, self._other_times = times, {}
            if self._forwards is not None and self._probes < _MOST_PROBES:
                self._probes += 1
                self._other_times = self._probe(self._forwards(), times)
        return self._other_times

    def _probe(self, forwards: Iterable[Callable[[], Any]], now: Inputs) -> dict[Content, Inputs]:
        found: dict[Content, Inputs] = {}
        try:
            for forward in forwards:
                times = self._times_in(forward)
                if _kinds_of(times) != _kinds_of(now):
                    return {}
                found[values_of(times)] = times
        except comfy.model_management.InterruptProcessingException:
            raise
        except Exception as error:  # noqa: BLE001 (the results are computed when they are needed)
            logger.debug("Resolute: no noise levels ahead: %s", error)
            return {}
        return found

    def _times_in(self, forward: Callable[[], Any]) -> Inputs:
        """The times with which a forward reaches its first block; empty if it reaches no block."""
        self._is_probing = True
        try:
            forward()
        except _FirstBlockReached as reached:
            return reached.times
        finally:
            self._is_probing = False
        return ()


def _kinds_of(times: Inputs) -> list[tuple[torch.Size, torch.dtype, torch.device]]:
    return [(each.shape, each.dtype, each.device) for each in times]


class NoiseLevels:
    """Converts the noise levels of a run into time inputs, as core's `BaseModel` does for its network."""

    def __init__(self) -> None:
        self._model: Callable[[], Any] = _nothing

    def begin(self, model: Any) -> None:
        """A sampling run of the model starts; None if the model is unknown. Keeps only a weak reference."""
        self._model = _nothing if model is None else weakref.ref(model)

    def forwards(
        self, forward: Callable[..., Any], positional: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Iterator[Callable[[], Any]]:
        """The call `forward(*positional, **named)` at each other noise level.

        Yields nothing if the current time does not belong to one of the run's noise levels: the sampler is between two
        of them, or other code set the time.
        """
        name = next((name for name in _TIMES if isinstance(named.get(name), torch.Tensor)), None)
        options, sampling = named.get(_OPTIONS) or {}, getattr(self._model(), "model_sampling", None)
        sigmas = options.get(SCHEDULE)
        if name is None or sampling is None or not isinstance(sigmas, torch.Tensor) or len(sigmas) > _MOST:
            return
        now: torch.Tensor = named[name]
        if now.ndim != 1:
            return
        levels = [_time_of(sampling, sigma, now) for sigma in sigmas.to(now.device) if sigma > 0]
        if not any(torch.equal(level, now) for level in levels):
            return
        for level in levels:
            if not torch.equal(level, now):
                given = {**named, name: level, _OPTIONS: {**options, PREFETCH: False}}  # no block will run
                yield functools.partial(forward, *positional, **given)


def _time_of(sampling: Any, sigma: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The time of a noise level, as `BaseModel._apply_model` computes it for each element of the batch."""
    time: torch.Tensor = sampling.timestep(sigma.expand(len(like)).contiguous()).float()
    return time.to(like.dtype)


def _nothing() -> None:
    return None
