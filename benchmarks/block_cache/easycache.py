"""Core's EasyCache around a pass, called through its own functions."""

from __future__ import annotations

import uuid
from typing import Any

import torch
from comfy_extras.nodes_easycache import (
    EasyCacheHolder,
    easycache_calc_cond_batch_wrapper,
    easycache_forward_wrapper,
)

from .passes import SHIFT, Passes, Predict

START, END = 0.15, 0.95  # the node's defaults


class _Levels:
    """The part of a model's sampling that EasyCache asks."""

    def percent_to_sigma(self, percent: float) -> float:
        t = 1 - percent
        return SHIFT * t / (1 + (SHIFT - 1) * t)


def easycache(passes: Passes, threshold: float) -> tuple[Predict, Any]:
    """A prediction with EasyCache, and its holder, which counts the skipped steps. For one run."""
    holder = EasyCacheHolder(threshold, START, END, 8, offload_cache_diff=False, output_channels=3)
    holder.prepare_timesteps(_Levels())
    uuids = [uuid.uuid4(), uuid.uuid4()]

    def predict(_: int, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        options = {"easycache": holder, "sigmas": t.view(1), "uuids": uuids}
        easycache_calc_cond_batch_wrapper(lambda *_: None, {"transformer_options": options})

        def full(x: torch.Tensor, *_: Any) -> torch.Tensor:
            return passes.run(x, t, is_full=True).clone()

        return easycache_forward_wrapper(full, x.clone(), t, options)

    return predict, holder
