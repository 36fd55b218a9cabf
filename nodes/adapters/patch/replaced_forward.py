"""Detect calls of a sampling run that do not reach our forward, and name the code that ran in its place.

Another pack may replace the forward for one call (WaveSpeed's first block cache) or the whole network (nodes around
torch.compile). The replacement exists only while the model is called, so a wrapper checks at that moment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import comfy.utils
import torch
from comfy.patcher_extension import WrappersMP

from ....compile_cache.code_identity.attributes import is_own
from ....compile_cache.errors import BypassCode, BypassReason
from ....compile_cache.texts import Text
from ..process import runtime
from ..trust.describe import describe_code, is_ours
from .forward_patch import ForwardPatch

logger = logging.getLogger(__name__)


class CallWatch:
    """Counts the calls of one sampling run that reach the forward, and records the code that ran in the others."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A sampling run starts."""
        self.calls = 0
        self._replaced = ""
        self._skipped = ""

    def record_miss(self, replaced: str | None, skipped: str) -> None:
        """Record a call that did not reach the forward. replaced: the code that ran in its place; None if the call was
        skipped, as step caches do in some steps of a run. skipped: the nodes that may have skipped it.
        """
        if replaced is not None:
            count_bypass(replaced)
            self._replaced = replaced
        self._skipped = skipped

    def end(self) -> str:
        """The reason why nothing ran compiled; empty if a call reached the forward or if there was no call."""
        if self.calls or not (self._replaced or self._skipped):
            return ""
        if not self._replaced:
            count_bypass(self._skipped)
        return self._replaced or self._skipped


def count_bypass(detail: str, is_logged: bool = False) -> None:
    """Count a call of the model that did not run our forward, and log each reason once."""
    is_new = runtime.cache().stats.bypass(BypassReason(BypassCode.REPLACED_FORWARD, detail))
    if is_new and not is_logged:
        logger.info("Resolute: %s", detail)


def watched(name: str, executor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps a call of a model: records a call that did not reach our forward at the path `name`."""
    model: Any = executor.class_obj  # type: ignore[attr-defined]  # core's WrapperExecutor
    patcher = getattr(model, "current_patcher", None)
    patch: Any = getattr(patcher, "object_patches", {}).get(name)
    watch = getattr(patch, "watch", None)
    if not isinstance(watch, CallWatch):
        return executor(*args, **kwargs)
    calls = watch.calls
    result = executor(*args, **kwargs)
    if watch.calls == calls:
        watch.record_miss(_replacement(patch, name, model), _may_have_skipped(patcher))
    return result


def _replacement(patch: ForwardPatch, name: str, model: torch.nn.Module) -> str | None:
    """A sentence that names the current replacement of `patch` at the path `name` of `model`; None without one."""
    path, _, method = name.rpartition(".")
    network = comfy.utils.get_attr(model, path)
    if not patch.is_alive or network is not patch.module:
        return Text("another node put {code} in place of the whole network", code=describe_code(network))
    found = vars(network).get(method)
    if found is not patch:
        if found is None or is_own(network, method, found):
            text = "the model's own {method} is in place: it was unloaded during the run, or another node put it back"
            return Text(text, method=method)
        return Text("{code} replaced the model's {method}", code=describe_code(found), method=method)
    if getattr(network, "_compiled_call_impl", None) is not None:
        return Text("torch.compile runs the whole network")
    return None


def _may_have_skipped(patcher: Any) -> str:
    kinds = (WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)
    wrappers = [each for kind in kinds for given in patcher.wrappers.get(kind, {}).values() for each in given]
    names = [describe_code(each) for each in wrappers if not is_ours(each)]
    who = Text.joined(" or ", names) if names else Text("another node")
    return Text("{who} answered in place of the model in every step", who=who)
