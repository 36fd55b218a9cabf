"""Overlap the steps of a sampling run: the CPU prepares the next step while the GPU still works on this one.

Core keeps conditioning in CPU memory and copies it to the GPU in every step. Such a copy blocks the CPU until the GPU
has finished all queued work, so nothing overlaps. Therefore we copy conditioning once, when a run starts.

Then nothing holds the CPU back, and it could queue many steps: the progress bar would show steps that the GPU has not
done, and Cancel would come too late. Therefore, after each step, the CPU waits until the GPU has finished the step
before.

Most of core's samplers compare a noise level on the CPU in every step, which blocks too: with those, steps do not
overlap. docs/limits.md names the samplers that read none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from comfy.conds import CONDCrossAttn, CONDRegular

_MAX_BYTES = 256 << 20  # of conditioning on the GPU, where it stays for the whole run


def overlap_steps(
    executor: Any, guider: Any, sigmas: Any, extra_args: Any, callback: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wraps a sampling run."""
    device = guider.model_patcher.load_device
    if device.type != "cuda" or "multigpu_clones" in extra_args["model_options"]:  # each GPU needs its own copy
        return executor(guider, sigmas, extra_args, callback, *args, **kwargs)
    conds, guider.conds = guider.conds, on_device(guider.conds, device)
    try:
        return executor(guider, sigmas, extra_args, _wait_for_previous_step(callback, device), *args, **kwargs)
    finally:
        guider.conds = conds


def on_device(conds: dict[str, list[dict[str, Any]]], device: torch.device) -> dict[str, list[dict[str, Any]]]:
    """The conds with those tensors on `device` that core would copy in every step.

    Moves all of them, or none if together they are larger than _MAX_BYTES: core only batches conds whose tensors are on
    the same device. Returns `conds` itself if nothing is moved. The given dicts are not changed.
    """
    values = [value for group in conds.values() for cond in group for value in cond["model_conds"].values()]
    copied = {id(value): value for value in values if _is_copied(value, device)}
    if sum(value.cond.nbytes for value in copied.values()) > _MAX_BYTES:
        return conds
    moved = {number: type(value)(value.cond.to(device)) for number, value in copied.items()}

    def with_moved(cond: dict[str, Any]) -> dict[str, Any]:
        own = {key: moved.get(id(value), value) for key, value in cond["model_conds"].items()}
        return {**cond, "model_conds": own}

    return {name: [with_moved(cond) for cond in group] for name, group in conds.items()}


def _is_copied(value: Any, device: torch.device) -> bool:
    # Exactly these two classes: other conds of core, and subclasses of other packs, hold more than one tensor.
    known = type(value) in (CONDRegular, CONDCrossAttn) and isinstance(value.cond, torch.Tensor)
    return known and value.cond.device != device


def _wait_for_previous_step(callback: Callable[..., Any] | None, device: torch.device) -> Callable[..., Any]:
    """Wrap the callback that core calls after each step, so that it first waits for the GPU to end the step before."""
    previous: torch.cuda.Event | None = None

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal previous
        end_of_step = torch.cuda.Event()  # type: ignore[no-untyped-call]
        end_of_step.record(torch.cuda.current_stream(device))
        if previous is not None:
            previous.synchronize()
        previous = end_of_step
        return None if callback is None else callback(*args, **kwargs)

    return wrapped
