"""Give a model a sampler of few steps, and report the runs of a warm-up's prompt at its last step node."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import comfy.samplers
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from ....compile_cache.errors import UserError
from ....compile_cache.keys import Role
from ....compile_cache.warm_up_plan import READY, WARMED, Outcome, table
from ..comfyui.transformer_options import STEP_CACHE_RUN
from ..patch.wrappers import set_wrapper
from ..process import runtime
from ..report import runs

_NAMES = {Role.UNET.value: "model", Role.VAE_DECODE.value: "VAE", Role.VAE_ENCODE.value: "encoder"}
_WORK = ("region_compiles", "region_loads", "captures")


def begin_step(value: Any) -> Any:
    """The work of a step node: pass the value on, a MODEL as a clone with a sampler of few steps.

    All runs of the current prompt then count as a warm-up's.
    """
    runs.begin_warm_up()
    return with_few_steps(value) if isinstance(value, ModelPatcher) else value


def with_few_steps(model: ModelPatcher) -> ModelPatcher:
    """A clone of a MODEL whose samplers make only the predictions needed to run every shape."""
    model = model.clone()
    # The last wrapper is the innermost one, so the model's and DeepCache's wrappers act as in any sampling run.
    set_wrapper(model, WrappersMP.SAMPLER_SAMPLE, "resolute-warm-up", _few_steps)
    return model


def _few_steps(executor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrapper of a sampler's `sample`: it takes the workflow's noise levels and skips most of them."""
    return comfy.samplers.KSAMPLER(_sample_once).sample(*args, **kwargs)


def _sample_once(
    model: Any, x: torch.Tensor, sigmas: torch.Tensor, extra_args: dict[str, Any] | None = None, **_: Any
) -> torch.Tensor:
    """A sampler function for core's `KSAMPLER` that makes only the predictions needed to warm up every shape.

    That is one for each stage (see `_stages`). With a step cache, each stage goes on until each kind of pass has run.
    Returns `x` unchanged.
    """
    arguments = extra_args or {}
    run = arguments.get("model_options", {}).get("transformer_options", {}).get(STEP_CACHE_RUN)
    levels = sigmas[:-1].tolist()
    for stage in _stages(levels, _boundaries(getattr(model.inner_model, "conds", {}))):
        before = {} if run is None else dict(run.passes)
        for step in stage:
            model(x, sigmas[step] * x.new_ones([x.shape[0]]), **arguments)
            if run is None or all(run.passes[kind] > count for kind, count in before.items()):
                break
    return x


def _stages(levels: Sequence[float], boundaries: Iterable[float]) -> Iterator[list[int]]:
    """Groups of steps within which no cond and no ControlNet starts or ends. boundaries: the sigmas where one does."""
    limits = sorted({torch.tensor(limit).item() for limit in boundaries})  # in fp32, as core compares them

    def place(step: int) -> tuple[int, int]:
        # A step exactly at a limit is its own group: conds that start there and conds that end there are both active.
        return sum(levels[step] > limit for limit in limits), sum(levels[step] >= limit for limit in limits)

    for _, steps in itertools.groupby(range(len(levels)), place):
        yield list(steps)


def _boundaries(conds: Any) -> Iterator[float]:
    """The noise levels (sigmas) at which a cond or one of its ControlNets starts or ends."""
    for cond in itertools.chain.from_iterable(conds.values()):
        for name in ("timestep_start", "timestep_end"):
            if cond.get(name) is not None:
                yield float(cond[name])
        control = cond.get("control")
        while control is not None:
            for level in getattr(control, "timestep_range", None) or ():
                yield float(level)
            control = getattr(control, "previous_controlnet", None)


def report() -> str:
    """A table of this prompt's compiled runs. Raises UserError if no compiled model or VAE ran."""
    found = runs.of_this_prompt()
    if not found:
        raise UserError("Nothing of this workflow ran compiled. See the texts on its compile nodes.")
    captures = runtime.cache().report()["entries"]
    return table(_outcome(run, captures) for run in found)


def _outcome(run: Mapping[str, Any], captures: Iterable[Mapping[str, Any]]) -> Outcome:
    state = WARMED if any(run["counts"].get(name, 0) for name in _WORK) else READY
    what, detail = _NAMES.get(run["role"], run["role"]), ", ".join(run["lines"])
    of_run = (run["structure"], run["size"])
    size = sum(each["bytes"] for each in captures if (each["model"], each["size"]) == of_run)
    return Outcome(run["size"], what, state, run["seconds"], size, detail)
