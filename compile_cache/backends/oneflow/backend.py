"""The backend `oneflow`: one OneFlow graph per signature, made by lowering the call's ATen operators."""

from __future__ import annotations

from ...config import CacheConfig
from ...regions.site import HookBuilder
from ...stats import Stats
from ...torch_facts.private_names import Loss, lost
from ..base import Backend, Capabilities, Program
from . import packages
from .program import OneFlowProgram
from .runtime import runtime


class OneFlowBackend(Backend):
    name = "oneflow"

    def probe(self, device: str) -> Capabilities:
        refusal = packages.unavailable_reason(device)
        if refusal is None and lost(Loss.CALLS):
            refusal = (lost(Loss.CALLS), "Update Resolute, or install an older torch.")
        if refusal is not None:
            return Capabilities(available=False, reason=refusal[0], remedy=refusal[1])
        return Capabilities(
            available=True,
            captures=True,
            reads_live_weights=True,
            returns_memory=False,
            needs_static_weights=True,
            detail=f"oneflow {packages.installed()}; one graph per size, rebuilt after a restart",
        )

    def bind(
        self, owner: int, capabilities: Capabilities, build_hooks: HookBuilder, stats: Stats, config: CacheConfig
    ) -> Program:
        return OneFlowProgram(owner, capabilities, runtime(), config.budget_bytes)
