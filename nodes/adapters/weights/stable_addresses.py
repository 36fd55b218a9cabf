"""Weights that ComfyUI puts onto the device anew at each load, kept at one address for captures."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ....compile_cache.regions.slots import Slot
from ....compile_cache.regions.weight_parts import is_plain
from ....compile_cache.torch_facts.private_names import foreach_copy


class StableAddresses:
    """Small weights and buffers of a model with paged weights.

    Each load makes new tensors of them. A capture reads the old ones, so `keep` copies the new values there and puts
    the old tensors back into the model: then nothing has moved, and no memory is held twice.
    """

    def __init__(self, host: str = "cpu") -> None:
        """host: the type of device where weights wait until they are loaded."""
        self._host = host
        self._kept: dict[tuple[int, str], torch.Tensor] = {}

    def keep(self, slots: Iterable[Slot]) -> None:
        """Keep the tensors of these slots alone where they first were. Those on the host stay where they are."""
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        before, self._kept = self._kept, {}
        for own, name in slots:
            new, key = own.get(name), (id(own), name)
            old = before.get(key)
            if old is not None:
                self._kept[key] = old
            if new is None or new is old or not is_plain(new) or new.device.type in (self._host, "meta"):
                continue
            if old is None or not _alike(old, new):
                self._kept[key] = new
                continue
            targets.append(old)
            sources.append(new)
            own[name] = old
        if targets:
            with torch.inference_mode():
                foreach_copy(targets, sources)

    def forget(self) -> None:
        """Let the tensors go: no capture reads them."""
        self._kept.clear()


def _alike(old: torch.Tensor, new: torch.Tensor) -> bool:
    return (
        type(old) is type(new)
        and old.shape == new.shape
        and old.dtype == new.dtype
        and old.device == new.device
        and old.stride() == new.stride()
    )
