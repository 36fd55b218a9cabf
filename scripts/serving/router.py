"""Serve's router for calls of replicas: it ranks them by what is warm. Serve's interface for it is alpha, so pinned."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from . import current_router
from .ranking import Candidate, Ranked, explain, rank

logger = logging.getLogger("ray.serve")

_KEPT = 256  # decisions
_SHARED = ("shapes", "structures", "files")


class WarmRouter(RequestRouter):
    """One for each process that calls replicas, which is the ingress.

    A call names what it needs in its argument `need` (`Need.plain`), and its prompt in `token`.
    """

    def initialize_state(self, imbalance: int = 4, assume_seconds: float = 6.0) -> None:
        """Called by Serve with `request_router_kwargs`.

        assume_seconds: how long a replica counts as warm for what was just sent to it, until its own report says so.
        """
        self._imbalance, self._assume = imbalance, assume_seconds
        self._sent: dict[str, collections.deque[tuple[float, Mapping[str, Any]]]] = {}
        self._ongoing: dict[str, str] = {}  # request -> replica
        self.decisions: dict[str, dict[str, Any]] = {}  # by prompt, the latest last
        current_router.set_router(self)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of replicas, the best first. Serve takes the least busy of a group that is not full."""
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        ranked = self._ranked(by_name, _need(pending_request))
        return [[by_name[name] for name in group] for group in ranked.groups]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count the call, assume that it makes its replica warm, and write down why it went there."""
        name, need = replica_id.unique_id, _need(pending_request)
        loads = self._loads()
        # Not with `on_request_completed`: for a short call Serve calls that first, and after a rejected one too.
        request = pending_request.metadata.internal_request_id
        self._ongoing[request] = name
        result.add_done_callback(lambda _: self._ongoing.pop(request, None))
        token = (pending_request.kwargs or {}).get("token")
        if not token:
            return
        by_name = {each.replica_id.unique_id: each for each in self._replicas_list}
        why = explain(self._ranked(by_name, need), name, loads)
        self._sent.setdefault(name, collections.deque(maxlen=64)).append((time.monotonic(), need))
        self.decisions[token] = {"prompt_id": token, "replica": name, "why": why}
        while len(self.decisions) > _KEPT:
            del self.decisions[next(iter(self.decisions))]
        logger.info("prompt %s goes to replica %s: %s", token, name, why)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Its calls do not complete."""
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id.unique_id)

    def state(self) -> list[dict[str, Any]]:
        """Each replica with its load and its report."""
        loads = self._loads()
        names = {each.replica_id.unique_id: each.routing_stats or {} for each in list(self._replicas_list)}
        return [{"replica": name, "load": loads[name], **stats} for name, stats in names.items()]

    def _ranked(self, by_name: Mapping[str, RunningReplica], need: Mapping[str, Any]) -> Ranked:
        loads = self._loads()
        found = [Candidate(name, loads[name], self._stats(name, each)) for name, each in by_name.items()]
        return rank(found, need, self._imbalance)

    def _loads(self) -> collections.Counter[str]:
        # Serve's own cache of queue lengths forgets after ten seconds, and a prompt takes longer.
        return collections.Counter(list(self._ongoing.values()))

    def _stats(self, name: str, replica: RunningReplica) -> Mapping[str, Any]:
        reported = replica.routing_stats or {}
        sent = self._sent.get(name)
        while sent and time.monotonic() - sent[0][0] > self._assume:
            sent.popleft()
        if not sent:
            return reported
        return {**reported, **{kind: {*reported.get(kind, ()), *_all(sent, kind)} for kind in _SHARED}}

    def _forget(self, name: str) -> None:
        self._sent.pop(name, None)
        self._ongoing = {request: each for request, each in self._ongoing.items() if each != name}


def _all(sent: collections.deque[tuple[float, Mapping[str, Any]]], kind: str) -> set[str]:
    return {each for _, need in sent for each in need.get(kind) or ()}


def _need(request: PendingRequest | None) -> Mapping[str, Any]:
    return (request.kwargs or {}).get("need") or {} if request is not None else {}
