"""Warm-ups of the fleet: `POST /resolute/warm-up` goes to several replicas, and each goes on until it is over."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from .background import Background
from .need import Need


class WarmUps:
    """Starts warm-ups through a handle of the replicas. states: of each replica's last one."""

    def __init__(self, handle: Any, needs: Callable[[Need], dict[str, Any]], background: Background) -> None:
        self._handle, self._needs, self._background = handle, needs, background
        self.states: dict[str, dict[str, Any]] = {}

    async def start(self, replica: str, body: Mapping[str, Any], need: Need) -> dict[str, Any]:
        """The replica's answer once it queued the warm-up. The call goes on in the background until it is over."""
        wanted = {**self._needs(need), "only": [replica]}
        token = str(uuid.uuid4())
        call = self._handle.options(stream=True).run.remote(body, need=wanted, token=token, path="/resolute/warm-up")
        async for kind, *rest in call:
            if kind == "accepted":
                state = self.states[replica] = {"prompt_id": rest[1]["prompt_id"], "is_over": False}
                self._background.start(_finish(call, state))
                return dict(rest[1])
            if kind in ("refused", "lost"):
                answer = rest[1] if kind == "refused" and isinstance(rest[1], dict) else {"error": str(rest[-1])}
                return answer if "error" in answer else {"error": str(answer)}
        return {"error": f"Replica {replica} ended the warm-up without an answer."}


async def _finish(call: Any, state: dict[str, Any]) -> None:
    try:
        async for kind, *rest in call:
            if kind in ("report", "lost"):
                state["end"] = rest[0]
    finally:
        state["is_over"] = True
