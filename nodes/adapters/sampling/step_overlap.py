"""Let the processor prepare the next step of a sampling run while the GPU works on this one.

Core keeps conditioning in the computer's memory and copies it to the GPU in every step, and such a copy waits for all
that the GPU has been told to do. So conditioning is copied once here, when a run starts. Nothing would then keep the
processor from running many steps ahead, with a progress bar that shows what is not done yet and a Cancel that comes too
late; so after each step it waits for the step before.

A sampler that compares a noise level in each step still waits there, which is most of core's: euler, ddim and uni_pc do
not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from comfy.conds import CONDCrossAttn, CONDRegular
from comfy.patcher_extension import WrappersMP

_KEY = "resolute-overlap"
_MOST = 256 << 20  # bytes that stay on the GPU for a whole run


def overlap_steps(patcher: Any) -> None:
    """Let the sampling runs of `patcher` (a clone of ours) overlap their steps."""
    patcher.remove_wrappers_with_key(WrappersMP.SAMPLER_SAMPLE, _KEY)
    patcher.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, _KEY, _sample)


def _sample(executor: Any, guider: Any, sigmas: Any, extra_args: Any, callback: Any, *args: Any, **kwargs: Any) -> Any:
    device = guider.model_patcher.load_device
    if device.type != "cuda" or "multigpu_clones" in extra_args["model_options"]:  # each GPU takes its own copies
        return executor(guider, sigmas, extra_args, callback, *args, **kwargs)
    conds, guider.conds = guider.conds, on_device(guider.conds, device)
    try:
        return executor(guider, sigmas, extra_args, _one_step_ahead(callback, device), *args, **kwargs)
    finally:
        guider.conds = conds


def on_device(conds: dict[str, list[dict[str, Any]]], device: torch.device) -> dict[str, list[dict[str, Any]]]:
    """The same conditioning, of which core would copy every tensor in every step, with these tensors on `device`.

    All of them or, where they are large, none: core runs only those together that are on one device.
    """
    values = [value for group in conds.values() for cond in group for value in cond["model_conds"].values()]
    copied = {id(value): value for value in values if _is_copied(value, device)}
    if sum(value.cond.nbytes for value in copied.values()) > _MOST:
        return conds
    moved = {number: type(value)(value.cond.to(device)) for number, value in copied.items()}

    def with_moved(cond: dict[str, Any]) -> dict[str, Any]:
        own = {key: moved.get(id(value), value) for key, value in cond["model_conds"].items()}
        return {**cond, "model_conds": own}

    return {name: [with_moved(cond) for cond in group] for name, group in conds.items()}


def _is_copied(value: Any, device: torch.device) -> bool:
    # Of other kinds core reads more than the tensor, and whatever another pack derived from these may keep more.
    known = type(value) in (CONDRegular, CONDCrossAttn) and isinstance(value.cond, torch.Tensor)
    return known and value.cond.device != device


def _one_step_ahead(callback: Callable[..., Any] | None, device: torch.device) -> Callable[..., Any]:
    """`callback`, called after each step, when the GPU is done with the step before."""
    before: torch.cuda.Event | None = None

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal before
        own = torch.cuda.Event()  # type: ignore[no-untyped-call]
        own.record(torch.cuda.current_stream(device))
        if before is not None:
            before.synchronize()
        before = own
        return None if callback is None else callback(*args, **kwargs)

    return called
