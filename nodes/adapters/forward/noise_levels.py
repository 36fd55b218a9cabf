"""The calls of a model at the other noise levels of its sampling run."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..comfyui.transformer_options import PREFETCH, SCHEDULE

_OPTIONS = "transformer_options"
_TIMES = ("timestep", "timesteps", "t")  # how core's models name the time
_MOST = 256  # noise levels


class NoiseLevels:
    """Of one model of core's, a `BaseModel`, which turns a noise level into the time that its network gets."""

    def __init__(self) -> None:
        self._model: Callable[[], Any] = _nothing

    def begin(self, model: Any) -> None:
        """A sampling run of the model starts; None: of an unknown one. It is held weakly."""
        self._model = _nothing if model is None else weakref.ref(model)

    def forwards(
        self, forward: Callable[..., Any], positional: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Iterator[Callable[[], Any]]:
        """The call `forward(*positional, **named)` at each other noise level.

        None, if the present time is not what core's model makes from one of the run's noise levels: a sampler is
        between two of them, or something else decides the time.
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
