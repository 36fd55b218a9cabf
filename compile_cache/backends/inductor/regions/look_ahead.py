"""Which regions a later call will need, before its weights are loaded: the model runs on tensors without contents."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ....config import CacheConfig
from ....regions.site import RegionSite, installed
from ....store.artifact_store import DIGEST_CHARS, ArtifactStore
from ...base import Call, ExpectedCall
from .binding import PLAIN_WEIGHTS, RegionBinding, is_plain
from .region import RegionCall, region_key
from .table import RegionTable


@dataclass(frozen=True, eq=False)
class Expected:
    """A call that will come soon, of the module with the number `owner`.

    missing: its regions without compiled code, by the call that waits for workers now.

    The tensors of these calls, and the weights inside `as_loaded`, have no contents.
    """

    owner: int
    missing: Callable[[RegionCall], list[RegionCall]]
    as_loaded: Callable[[], AbstractContextManager[None]]


def expected(
    owner: int, call: ExpectedCall, table: RegionTable, store: ArtifactStore | None, config: CacheConfig, now: Call
) -> Expected:
    """now: the call that waits for workers; torch's flags will be the same in the expected one."""

    def missing(current: RegionCall) -> list[RegionCall]:
        with call.as_loaded():
            looking = _LookAhead(call.device, table, store, config, current)
            looking.begin(now.progress, now.state)
            hooks = call.build_hooks(looking.run, lambda reason: None)
            looking.survey(hooks)
            with installed(hooks):
                call.invoke(now.tensors[0].shape)
        stored = set() if store is None else {name.partition("-")[0] for name in store.names()}
        return [found for key, found in looking.found.items() if key[:DIGEST_CHARS] not in stored]

    return Expected(owner, missing, call.as_loaded)


class _LookAhead(RegionBinding):
    """Collects the regions that have no compiled code, and computes nothing but shapes."""

    def __init__(
        self,
        device: torch.device,
        table: RegionTable,
        store: ArtifactStore | None,
        config: CacheConfig,
        current: RegionCall,
    ) -> None:
        super().__init__(table, lambda device: store, lambda: True, lambda reason: None, current.stats, config)
        self._device, self._current = device, current
        self.found: dict[str, RegionCall] = {}

    def run(self, site: RegionSite, *tensors: torch.Tensor) -> Any:
        bound = self._sites.get(site) or self._bind(site, is_hooked=True)
        if bound.refused is not None:
            raise ValueError(bound.refused.detail)  # code of another pack runs in calls alone
        weights = [slots[name] for slots, name in bound.slots]
        inputs = [_placeholder(tensor, self._device) for tensor in tensors]
        if is_plain(bound, weights, inputs[0].dtype, self._rules):
            key = region_key(site, bound.structure, inputs, PLAIN_WEIGHTS, self._state)
            region = self._table.region(key, site.kind)
            call = replace(
                self._current, region=region, site=site, weights=weights, tensors=inputs, announce=lambda: None
            )
            if not region.compiled and call.fits and call.static not in region.failures:
                self.found.setdefault(key, call)
        return site.function(site.module, *tensors)


def _placeholder(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of this shape and dtype on a device, which takes no memory."""
    return torch.empty((1,) * tensor.ndim, dtype=tensor.dtype, device=device).expand(tensor.shape)
