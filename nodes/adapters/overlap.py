"""Let the processor prepare the next step of a sampling run while the GPU works on this one.

Core keeps conditioning in the computer's memory and copies it to the GPU in every step, and such a copy waits for all
that the GPU has been told to do. So conditioning is copied once here, when a run starts. Nothing would then keep the
processor from running many steps ahead, with a progress bar that shows what is not done yet and a Cancel that comes too
late; so after each step it waits for the step before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from comfy.conds import CONDCrossAttn, CONDRegular
from comfy.patcher_extension import WrappersMP

_KEY = "resolute-overlap"
_MOST = 64 << 20  # bytes of one tensor that stays on the GPU for a whole run

StepCallback = Callable[[int, Any, Any, int], None]


def overlap_steps(patcher: Any) -> None:
    """Let the sampling runs of `patcher` (a clone of ours) overlap their steps."""
    patcher.remove_wrappers_with_key(WrappersMP.SAMPLER_SAMPLE, _KEY)
    patcher.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, _KEY, _sample)


def _sample(
    executor: Any, guider: Any, sigmas: Any, extra_args: Any, callback: StepCallback | None, *args: Any, **kwargs: Any
) -> Any:
    device = guider.model_patcher.load_device
    if device.type != "cuda" or "multigpu_clones" in extra_args["model_options"]:  # each GPU takes its own copies
        return executor(guider, sigmas, extra_args, callback, *args, **kwargs)
    conds, guider.conds = guider.conds, on_device(guider.conds, device)
    try:
        return executor(guider, sigmas, extra_args, _one_step_ahead(callback, device), *args, **kwargs)
    finally:
        guider.conds = conds


def on_device(conds: dict[str, list[dict[str, Any]]], device: torch.device) -> dict[str, list[dict[str, Any]]]:
    """The same conditioning, of which core would copy every tensor in every step, with these tensors on `device`."""
    return {
        name: [{**cond, "model_conds": _all_moved(cond["model_conds"], device)} for cond in group]
        for name, group in conds.items()
    }


def _all_moved(values: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: _moved(value, device) for key, value in values.items()}


def _moved(value: Any, device: torch.device) -> Any:
    # Of other kinds core reads more than the tensor, and whatever another pack derived from these may keep more.
    if type(value) not in (CONDRegular, CONDCrossAttn) or not isinstance(value.cond, torch.Tensor):
        return value
    if value.cond.device == device or value.cond.nbytes > _MOST:
        return value
    return type(value)(value.cond.to(device))


def _one_step_ahead(callback: StepCallback | None, device: torch.device) -> StepCallback:
    """`callback`, called after each step, when the GPU is done with the step before."""
    before: torch.cuda.Event | None = None

    def called(step: int, denoised: Any, x: Any, steps: int) -> None:
        nonlocal before
        own = torch.cuda.Event()
        own.record(torch.cuda.current_stream(device))
        if before is not None:
            before.synchronize()
        before = own
        if callback is not None:
            callback(step, denoised, x, steps)

    return called
