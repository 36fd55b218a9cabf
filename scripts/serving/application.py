"""The Serve application: one ingress in front of the replicas. `scripts/fleet` deploys it."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from . import config as settings
from .ingress import Ingress
from .replica import Replica
from .router import WarmRouter

_ANY_NUMBER = 100_000


def build(config: settings.FleetConfig) -> serve.Application:
    """The application for these settings."""
    replicas = serve.deployment(Replica).options(  # type: ignore[attr-defined]
        name="replica",
        max_ongoing_requests=config.ongoing,
        max_queued_requests=config.waiting,
        ray_actor_options={"num_cpus": config.cpus, "num_gpus": config.gpus},
        graceful_shutdown_timeout_s=config.drain_seconds,
        health_check_period_s=5.0,
        request_router_config=_router(config),
        **_size(config),
    )
    # It does no work of its own and reserves nothing; each open websocket counts as a request.
    ingress = serve.deployment(Ingress).options(  # type: ignore[attr-defined]
        name="ingress",
        num_replicas=1,
        max_ongoing_requests=_ANY_NUMBER,
        ray_actor_options={"num_cpus": 0},
        user_config={},  # so that Serve calls `Ingress.reconfigure`
    )
    application: serve.Application = ingress.bind(config.plain(), replicas.bind(config.plain()))
    return application


def _size(config: settings.FleetConfig) -> dict[str, Any]:
    if config.max_replicas <= config.replicas:
        return {"num_replicas": config.replicas}
    scaling = AutoscalingConfig(
        min_replicas=config.replicas,
        initial_replicas=config.replicas,
        max_replicas=config.max_replicas,
        target_ongoing_requests=config.target_ongoing,
        upscale_delay_s=config.grow_seconds,
        downscale_delay_s=config.shrink_seconds,
    )
    return {"autoscaling_config": scaling}


def _router(config: settings.FleetConfig) -> RequestRouterConfig:
    period = {"request_routing_stats_period_s": config.stats_seconds}
    if config.router == "warm":
        kwargs = {"imbalance": config.imbalance, "assume_seconds": 3 * config.stats_seconds}
        return RequestRouterConfig(request_router_class=WarmRouter, request_router_kwargs=kwargs, **period)
    return RequestRouterConfig(**period)
