"""The work of step nodes in the prompt of a warm-up: a model gets a sampler of few steps, and the last node reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import comfy.samplers
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from ....compile_cache.errors import UserError
from ....compile_cache.keys import Role
from ....compile_cache.warm_up_plan import READY, WARMED, Outcome, table
from ..comfyui.messages import broadcast
from ..report import cache_report, runs
from ..sampling.wrappers import set_wrapper
from .predict import sample_once

_NAMES = {Role.UNET.value: "model", Role.VAE_DECODE.value: "VAE", Role.VAE_ENCODE.value: "encoder"}
_WORK = ("region_compiles", "region_loads", "captures")


def with_few_steps(value: Any) -> Any:
    """A clone of a MODEL whose samplers make as few predictions as show every shape; any other value as it is.

    The runs of the prompt that is running count as those of a warm-up.
    """
    runs.begin_warm_up()
    if not isinstance(value, ModelPatcher):
        return value
    model = value.clone()
    # The last wrapper is the innermost one, so those of the model and of DeepCache act as in any sampling run.
    set_wrapper(model, WrappersMP.SAMPLER_SAMPLE, "resolute-warm-up", _sample_once)
    return model


def _sample_once(executor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrapper of a sampler's `sample`: the noise levels are those of the workflow, and most of them are skipped."""
    return comfy.samplers.KSAMPLER(sample_once).sample(*args, **kwargs)


def report() -> str:
    """A table of what ran in this prompt; the open front ends get the sizes that are ready.

    Raises UserError if no compiled model or VAE ran.
    """
    found = runs.of_this_prompt()
    if not found:
        raise UserError("Nothing of this workflow ran compiled. See the texts on its compile nodes.")
    cache = cache_report.report()
    broadcast("warmed", sizes=list(dict.fromkeys(run["size"] for run in found)), took=_seconds(found))
    return table(_outcome(run, cache) for run in found)


def _outcome(run: Mapping[str, Any], cache: Mapping[str, Any]) -> Outcome:
    state = WARMED if any(run["counts"].get(name, 0) for name in _WORK) else READY
    what, detail = _NAMES.get(run["role"], run["role"]), ", ".join(run["lines"])
    return Outcome(run["size"], what, state, run["seconds"], _bytes(run, cache), detail)


def _bytes(run: Mapping[str, Any], cache: Mapping[str, Any]) -> int:
    """The memory of the captures of a run's model at its size."""
    shapes = [shape for model in cache["models"] for shape in model["shapes"]]
    mine = [each for each in shapes if (each["model"], each["size"]) == (run["structure"], run["size"])]
    return sum(each["bytes"] or 0 for each in mine)


def _seconds(found: list[dict[str, Any]]) -> float:
    return sum(float(run["seconds"]) for run in found)
