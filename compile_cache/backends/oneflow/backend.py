"""The backend `oneflow`: one OneFlow graph per signature, compiled by onediff or by our own lowering."""

from __future__ import annotations

from collections.abc import Callable

from ...config import CacheConfig
from ...modules.site import HookBuilder
from ...telemetry.stats import Stats
from ...torch_compat.private_names import Feature, why_unavailable
from ..base import Backend, Capabilities, Program
from . import packages
from .forward import Compiler
from .lowering import LoweringCompiler
from .onediff import OnediffCompiler
from .program import OneFlowProgram
from .runtime import runtime


class OneFlowBackend(Backend):
    """compiler: a name in COMPILERS; None chooses `onediff` if this OneFlow supports it, else `lowering`."""

    name = "oneflow"

    def __init__(self, compiler: str | None = None) -> None:
        self._chosen = compiler

    def probe(self, device: str) -> Capabilities:
        refusal = packages.unavailable_reason(device)
        if refusal is None and why_unavailable(Feature.CALLS):
            refusal = (why_unavailable(Feature.CALLS), "Update Resolute, or install an older torch.")
        if refusal is not None:
            return Capabilities(available=False, reason=refusal[0], remedy=refusal[1])
        return Capabilities(
            available=True,
            captures=True,
            keeps_graphs=True,
            needs_static_weights=True,
            detail=self._detail(),
        )

    def bind(
        self, owner: int, capabilities: Capabilities, build_hooks: HookBuilder, stats: Stats, config: CacheConfig
    ) -> Program:
        return OneFlowProgram(owner, capabilities, self._compiler(), runtime(), config.budget_bytes)

    def _compiler(self) -> Compiler:
        name = self._chosen or ("onediff" if packages.onediff_is_native() else "lowering")
        return COMPILERS[name]()

    def _detail(self) -> str:
        return f"compiler {self._compiler().name}, {packages.installed()}; one graph per size, rebuilt after a restart"


COMPILERS: dict[str, Callable[[], Compiler]] = {"lowering": LoweringCompiler, "onediff": OnediffCompiler}
