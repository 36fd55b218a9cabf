"""Checks the counters of prompts: everything that should run compiled did, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..rig import AGAINST_CAPTURES
from .patches import NVIDIA_FLAGS
from .workflow import Architecture, Workflow


class Costs:
    """Remembers what the server has compiled so far. backend: the "chosen" one. background_compile: it compiles while
    prompts run, so that no prompt is sure to run any region.
    """

    def __init__(self, backend: str, on_cuda: bool, background_compile: bool = False) -> None:
        self._backend, self._background_compile = backend, background_compile
        self._on_cuda = on_cuda
        self._met: set[Architecture] = set()

    def wrong(self, workflows: Sequence[Workflow], rise: dict[str, Any]) -> list[str]:
        """Problems in the counters of finished prompts; rise: their total increase."""
        found = [] if self._background_compile else self._whole_forwards(workflows, rise)
        if rise["compile_failures"]:
            found.append("a region failed to compile")
        explained = {code for workflow in workflows for code in workflow.bypasses}
        if not set(rise["bypasses"]) <= explained | (AGAINST_CAPTURES if self._on_cuda else set()):
            found.append(f"bypasses that nothing explains, but for {sorted(explained)}")
        if rise["captures"] > rise["graph_calls"]:  # a known signature is captured again
            found.append("more captures than forwards that could be captured")
        architectures = {self._key(each) for workflow in workflows for each in workflow.architectures}
        as_is = any(workflow.runs_as_is for workflow in workflows)
        if rise["region_compiles"] and architectures <= self._met and not (as_is or self._background_compile):
            found.append("regions were compiled again")
        if not rise["bypasses"]:  # a patched block is compiled only when it runs without the patch
            self._met.update(self._key(each) for workflow in workflows for each in workflow.certain_architectures)
        return found

    def _key(self, architecture: Architecture) -> Architecture:
        """The architecture with the flags that this device reads."""
        kind, casts, flags = architecture
        return kind, casts, flags if self._on_cuda else tuple(flag for flag in flags if flag not in NVIDIA_FLAGS)

    def _whole_forwards(self, workflows: Sequence[Workflow], rise: dict[str, Any]) -> list[str]:
        """Problems if a backend ran whole forwards that it must not, or ran none although it must."""
        sure = {name for workflow in workflows for name in workflow.backends}
        possible = sure.union(*(workflow.control_backends for workflow in workflows))
        found = []
        if not possible and any(count for name, count in rise.items() if name != "evictions"):  # ComfyUI needed memory
            found.append("a prompt without a compile node went through the cache")
        if "eager" in sure and not rise["eager_calls"]:
            found.append("the backend eager was not used")
        if self._backend != "inductor":  # no regions: what cannot be captured runs eagerly
            return found
        through_regions = rise["graph_calls"] + rise["replays"]
        if any(workflow.runs_as_is for workflow in workflows):
            return found
        if "eager" not in possible and rise["eager_calls"]:
            found.append("whole forwards ran eagerly")
        if "chosen" in sure and not through_regions:
            found.append("nothing ran through regions")
        if "chosen" not in possible and through_regions:
            found.append("forwards ran through regions without a node for it")
        if through_regions and not (rise["region_calls"] or rise["replays"] or rise["bypasses"]):
            found.append("forwards through regions ran no region")
        return found
