"""The hooks of one module: built once, and rebuilt only after the module's code changed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ....compile_cache.errors import BypassReason
from ....compile_cache.keys import Role
from ....compile_cache.modules.site import Bypass, Hook, Input, LendingRunner, RegionRunner, RegionSite
from ....compile_cache.modules.structure import Memo, structure_digest
from ..blocks.families import hooks_of, require_known, without
from ..comfyui import chosen_attention, version
from ..comfyui.module_attributes import ATTRIBUTES
from ..dynamic_vram.streamed_blocks import streamed
from ..module_state.module_state import ModuleState


class ModuleHooks:
    """Builds the hooks of a module for one program; a `HookBuilder`.

    The compile node counts the regions of a module before its weights are loaded. The program asks for the same hooks
    at each new weights epoch, most of which only move weights. So the hooks are reused until the version of the
    settings or of the code changes.

    The reference to the module is weak, because the program keeps this object alive.
    """

    def __init__(self, module: torch.nn.Module, role: Role, names: tuple[str, ...], weights: ModuleState) -> None:
        """names: of blocks that are left out, see `left_out`."""
        self._module = weakref.ref(module)
        self._role, self._names, self._weights = role, names, weights
        self._run: RegionRunner = _run_nothing
        self._bypass: Bypass = _report_nothing
        self._built_for: tuple[object, ...] = ()
        self._all_hooks: list[Hook] = []
        self._active_hooks: list[Hook] = []
        self._count: int | None = None  # of their regions
        self._reasons: list[BypassReason] = []  # why blocks have no hook

    def __call__(self, run: LendingRunner, bypass: Bypass) -> Sequence[Hook]:
        """Connect the hooks to `run` and `bypass`, and return them. Reports to `bypass` why blocks have no hook.

        The weights epoch was brought up to date before this call.
        """
        self._run, self._bypass = streamed(run, self._weights.paged), bypass
        self._build_if_changed()
        for reason in self._reasons:
            bypass(reason)
        return self._active_hooks

    def known(self) -> Sequence[Hook]:
        """The hooks before any call. Raises UserError if a name of `left_out` is certainly no block of the module."""
        self._weights.look()
        self._build_if_changed()
        require_known(self._names, self._all_hooks, self._reasons)
        return self._active_hooks

    def count(self) -> int:
        """The number of regions of these hooks that are known before a call. Raises as `known` does."""
        hooks = self.known()
        if self._count is None:
            sites, memo = [site for hook in hooks for site in hook.sites], Memo()
            digests = [structure_digest(site.module, memo, site.without, policy=ATTRIBUTES) for site in sites]
            made = {(hook.label[0], hook.structure) for hook in hooks if hook.label is not None}
            self._count = len({(site.kind, digest) for site, digest in zip(sites, digests, strict=True)} | made)
        return self._count

    def close(self) -> None:
        """The module was garbage collected: drop the references to its blocks."""
        self._built_for, self._all_hooks, self._active_hooks = (), [], []
        self._run, self._bypass = _run_nothing, _report_nothing

    def _build_if_changed(self) -> None:
        module, versions = self._module(), self._weights.versions
        attention = (chosen_attention.default(), version.vae_attention_is_traceable())
        now = (versions["settings"], versions["code"], *attention)
        if module is None or now == self._built_for:
            return
        self._reasons, called = [], self._bypass
        self._bypass = self._reasons.append
        try:
            self._all_hooks = hooks_of(module, self._role, self._run_site, self._report)
            self._active_hooks = without(self._names, self._all_hooks, self._report)
        finally:
            self._bypass = called
        self._built_for, self._count = now, None

    def _run_site(self, site: RegionSite, *inputs: Input) -> Any:
        return self._run(site, *inputs)

    def _report(self, reason: BypassReason) -> None:
        self._bypass(reason)


def _run_nothing(site: RegionSite, *inputs: Input) -> Any:
    raise AssertionError("hooks that no program asked for do not run")


def _report_nothing(reason: BypassReason) -> None:
    pass
