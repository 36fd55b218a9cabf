"""Count the calls of a sampling run that reach our forward, and keep what answered the others."""

from __future__ import annotations

import logging

from ....compile_cache.errors import BypassCode, BypassReason
from ..process import runtime

logger = logging.getLogger(__name__)


class CallWatch:
    """The calls of one sampling run: how many reached the forward, and what answered the others."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A sampling run starts."""
        self.calls = 0
        self._replaced = ""
        self._skipped = ""

    def missed(self, replaced: str | None, skipped: str) -> None:
        """Note a call that did not reach the forward. replaced: what ran in its place, if anything did. Otherwise it
        was skipped, as step caches do in some steps of a run, and `skipped` names what may have done it.
        """
        if replaced is not None:
            count_bypass(replaced)
            self._replaced = replaced
        self._skipped = skipped

    def end(self) -> str:
        """Why nothing ran compiled; empty where a call reached the forward, or where there was no call."""
        if self.calls or not (self._replaced or self._skipped):
            return ""
        if not self._replaced:
            count_bypass(self._skipped)
        return self._replaced or self._skipped


def count_bypass(detail: str, is_logged: bool = False) -> None:
    """Count a call of the model that ran something else than our forward, and log the reason once."""
    is_new = runtime.cache().stats.bypass(BypassReason(BypassCode.REPLACED_FORWARD, detail))
    if is_new and not is_logged:
        logger.info("Resolute: %s", detail)
