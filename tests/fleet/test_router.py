"""Our router against Serve's own, on real Ray Serve with replicas that only count."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from scripts.serving import current_router
from scripts.serving.ray_start import LocalRay
from scripts.serving.router import WarmRouter

pytestmark = pytest.mark.long  # a Ray of its own takes longer to start than the calls
COLD = 0.4  # seconds of a shape's first prompt at a replica
SHAPES = [f"m {side}x512x1" for side in range(256, 1024, 128)]
ROUTERS: dict[str, dict[str, Any]] = {
    "warm": {"request_router_class": WarmRouter},
    "default": {},
}


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # short: the names of sockets hold about 100 letters
        local = LocalRay(Path(folder) / "ray.log", cpus=2, temporary=Path(folder))
        try:
            local.start()
            yield
            serve.shutdown()
        finally:
            ray.shutdown()
            local.stop()


def replicas(router: str) -> Any:
    @serve.deployment(
        name=f"fake-{router}",
        num_replicas=2,
        max_ongoing_requests=8,
        ray_actor_options={"num_cpus": 0.1},
        request_router_config=RequestRouterConfig(**ROUTERS[router], request_routing_stats_period_s=0.2),
    )
    class Fake:
        def __init__(self) -> None:
            self.warm: set[str] = set()
            self.lock = asyncio.Lock()

        async def run(self, *, need: dict[str, Any], token: str) -> tuple[str, bool]:
            async with self.lock:
                is_cold = not set(need["shapes"]) <= self.warm
                await asyncio.sleep(0.01 + COLD * is_cold)
                self.warm |= set(need["shapes"])
            return str(serve.get_replica_context().replica_id.unique_id), is_cold

        def record_routing_stats(self) -> dict[str, Any]:
            return {"shapes": sorted(self.warm), "ready": True}

    return serve.run(Fake.bind(), name=f"app-{router}", route_prefix=None)


async def drive(handle: Any) -> list[tuple[str, bool]]:
    """48 calls of six shapes from four clients, the same for every router."""
    chooser = random.Random(1)
    traces = [[chooser.choice(SHAPES) for _ in range(12)] for _ in range(4)]

    async def client(number: int) -> list[tuple[str, bool]]:
        found = []
        for index, shape in enumerate(traces[number]):
            found.append(await handle.run.remote(need={"shapes": [shape]}, token=f"{number}-{index}"))
        return found

    return [each for found in await asyncio.gather(*map(client, range(4))) for each in found]


def wait_for_no_load() -> None:
    """Fails if a call that ended stays counted; Serve says so a moment after the answer."""
    deadline = time.monotonic() + 10
    while any(each["load"] for each in current_router.replicas()):
        assert time.monotonic() < deadline, current_router.replicas()
        time.sleep(0.05)


def test_fewer_prompts_are_cold_than_with_serves_router() -> None:
    cold = {}
    for router in ROUTERS:
        answers = asyncio.run(drive(replicas(router)))
        cold[router] = sum(is_cold for _, is_cold in answers)
        if router == "warm":
            assert len({replica for replica, _ in answers}) == 2, "one replica did all the work"
            decisions = {each["prompt_id"]: each for each in current_router.decisions()}
            assert len(decisions) == 48
            assert {each["why"].partition(":")[0] for each in decisions.values()} == {"any", "capture"}
            wait_for_no_load()
        serve.delete(f"app-{router}")
    print(f"cold prompts of 48: {cold}")
    # A shape is cold once; the imbalance may send it to the other replica too.
    assert len(SHAPES) <= cold["warm"] < cold["default"]
