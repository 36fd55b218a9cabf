"""CUDA graphs of the unmodified forward: no compilation; the eager kernels run without their launch overhead."""

from __future__ import annotations

from typing import Any

import torch

from ..config import CacheConfig
from ..modules.site import HookBuilder
from ..telemetry.stats import Stats
from ..torch_compat.gpu import is_nvidia
from ..torch_compat.private_names import Feature, why_unavailable
from .base import Backend, Call, Capabilities, CaptureFacts, Graph, Program
from .cuda_graphs.capture import Recorder
from .eager import EagerProgram


class CudaGraphProgram(EagerProgram):
    def __init__(self, owner: int, capabilities: Capabilities) -> None:
        super().__init__(owner, capabilities)
        self._recorder = Recorder()

    def capture(self, call: Call, result: Any, facts: CaptureFacts) -> Graph:
        return self._recorder.capture(call, result, facts)


class CudaGraphBackend(Backend):
    name = "cudagraph"

    def probe(self, device: str) -> Capabilities:
        lack = why_unavailable(Feature.CALLS)
        if lack:
            return Capabilities(available=False, reason=lack, remedy="Update Resolute, or install an older torch.")
        if is_nvidia(device) and torch.cuda.is_available():
            return Capabilities(available=True, captures=True)
        return Capabilities(
            available=False,
            reason=f"CUDA graphs need an NVIDIA GPU, and this model runs on '{device}'",
            remedy="Choose 'auto' or 'inductor'.",
        )

    def bind(
        self, owner: int, capabilities: Capabilities, build_hooks: HookBuilder, stats: Stats, config: CacheConfig
    ) -> Program:
        return CudaGraphProgram(owner, capabilities)
