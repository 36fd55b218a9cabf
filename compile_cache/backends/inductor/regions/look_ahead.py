"""The regions of an upcoming decode, found before its weights are loaded: the decoder runs without contents."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from ....config import CacheConfig
from ....regions.region_weights import weight_inputs
from ....regions.site import Input, RegionSite, installed, taken
from ....stats import Stats
from ....store.artifact_store import DIGEST_CHARS, ArtifactStore
from ...base import Call, UpcomingDecode
from .binding import RegionBinding
from .region import Region, RegionCall
from .table import RegionTable


class LookAhead(RegionBinding):
    """Collects the regions of a decode that have no compiled code, and computes nothing but shapes.

    owner: the number of the decoder. now: the call that waits for workers; torch's flags will be the same in the
    decode. The tensors of the calls that `missing` returns, and the weights inside `as_loaded`, have no contents.
    """

    weights_on = torch.device("meta")

    def __init__(
        self,
        owner: int,
        decode: UpcomingDecode,
        now: Call,
        table: RegionTable,
        store: ArtifactStore | None,
        stats: Stats,
        config: CacheConfig,
    ) -> None:
        super().__init__(table, lambda device: store, lambda: True, lambda reason: None, stats, config)
        self.owner = owner
        self._decode, self._now, self._kept = decode, now, store
        self._found: dict[str, RegionCall] = {}

    def as_loaded(self) -> AbstractContextManager[None]:
        return self._decode.as_loaded()

    def missing(self) -> list[RegionCall]:
        """A call of each region without compiled code. Raises whatever the decoder raises, and ValueError where it must
        not run ahead.
        """
        with self.as_loaded():
            self.begin(self._now.progress, self._now.torch_flags)
            hooks = self._decode.build_hooks(self.run, lambda reason: None)
            self.survey(hooks)
            with installed(hooks):
                self._decode.invoke(self._now.tensors[0].shape)
        stored = set() if self._kept is None else {name.partition("-")[0] for name in self._kept.names()}
        return [call for key, call in self._found.items() if key[:DIGEST_CHARS] not in stored]

    def run(self, site: RegionSite, *given: Input) -> Any:
        tensors = taken(given)
        bound = self._bound(site)
        if bound.refused is not None:
            raise ValueError(bound.refused.detail)  # code of another pack runs in calls alone
        weights = weight_inputs(bound.slots)
        inputs = [_placeholder(tensor, self._decode.device) for tensor in tensors]
        region = self._region(site, bound, weights, inputs)
        if isinstance(region, Region) and not region.compiled:
            call = self._call(region, site, weights, inputs)
            if call.fits and call.static not in region.failures:
                self._found.setdefault(region.key, call)
        return site.function(site.module, *tensors)


def _placeholder(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of this shape and dtype on a device, which takes no memory."""
    return torch.empty((1,) * tensor.ndim, dtype=tensor.dtype, device=device).expand(tensor.shape)
