"""The original forward with the cache's counters: the reference for the other backends."""

from __future__ import annotations

from typing import Any

from ..config import CacheConfig
from ..modules.site import HookBuilder
from ..telemetry.stats import Stats
from .base import Backend, Call, Capabilities, Program


class EagerProgram(Program):
    def run(self, call: Call) -> Any:
        return call.invoke(call.tensors)


class EagerBackend(Backend):
    name = "eager"

    def probe(self, device: str) -> Capabilities:
        return Capabilities(available=True)

    def bind(
        self, owner: int, capabilities: Capabilities, build_hooks: HookBuilder, stats: Stats, config: CacheConfig
    ) -> Program:
        return EagerProgram(owner, capabilities)
