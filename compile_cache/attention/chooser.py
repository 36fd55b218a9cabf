"""The attention operator of compiled regions, which chooses a kernel at run time.

A trace would fix one kernel for a region, which serves every shape, but the fastest kernel depends on the shape.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..errors import first_line
from ..torch_compat.operators import defined, shared
from ..torch_compat.out_of_memory import is_out_of_memory
from ..tuning.machine import machine_of
from ..tuning.tuner import Tuner
from .kernels import (
    CUDNN,
    EFFICIENT,
    FLASH,
    AttentionArgs,
    Kernel,
    Layout,
    compile_cudnn,
    kernels_for,
    torch_attention,
    with_masked_row,
)
from .shape import Choice, Shape, nearest, shape_of
from .timing import agrees, seconds_of

logger = logging.getLogger(__name__)

# Wraps work that a prompt waits for. Its argument is a text for users.
Waiting = Callable[[str], AbstractContextManager[None]]

_SCHEMA = "(Tensor q, Tensor k, Tensor v, Tensor? mask=None, float? scale=None, bool enable_gqa=False) -> Tensor"
_MARGIN = 0.9  # another kernel must take less than this share of the first one's time: times vary
# Once a kernel takes less, no other is tried: cuDNN needs 40 to 80 ms to prepare each new shape.
_WORTH_SECONDS = 25e-6


_is_eager = ContextVar("blocks compute attention by their own code", default=False)


@contextlib.contextmanager
def eager_attention() -> Iterator[None]:
    """Inside, blocks run instead of compiled code and call their own attention: no kernel is measured, and an attention
    function of another pack takes effect.
    """
    token = _is_eager.set(True)
    try:
        yield
    finally:
        _is_eager.reset(token)


is_eager_attention = _is_eager.get


class LacksMemoryError(Exception):
    """There is not enough memory to measure kernels."""


class Chooser:
    """Runs attention with the fastest kernel for the shape, which it measures at the shape's first call.

    Each kernel's result is first compared with the result of flash or of torch's own choice. If a kernel fails, torch's
    own choice replaces it. Nothing is measured during a CUDA graph capture: an unknown shape raises, because the graph
    would keep torch's choice for good.
    """

    def __init__(
        self,
        seconds: Callable[[Callable[[], object], torch.device], float] = seconds_of,
        kernels: Callable[[torch.device], dict[str, Kernel]] = kernels_for,
    ) -> None:
        """seconds: returns the seconds of one run on a device."""
        self._seconds, self._kernels = seconds, kernels
        self._waiting: Waiting = lambda text: contextlib.nullcontext()
        self._tuner = _tuner(None)
        self._ready: dict[tuple[str, Shape], Kernel] = {}
        self._kinds: set[tuple[torch.device, torch.dtype, int]] = set()  # cuDNN compiles for them in a thread

    def use(self, folder: Path | None, waiting: Waiting) -> None:
        """Keep choices in `folder`, or in memory if it is None. `waiting` wraps work that a prompt waits for."""
        self._tuner, self._waiting = _tuner(folder), waiting
        self._ready.clear()

    def __call__(self, args: AttentionArgs) -> torch.Tensor:
        """Return the result as (batch, tokens, heads, width), contiguous. Raises the errors of torch's own choice, and
        OutOfMemoryError in a capture if there was no memory to measure the shape before."""
        q = args.q
        place = (str(q.device), shape_of(args))
        capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
        run = self._ready.get(place)
        if run is None:
            if capturing:
                raise torch.OutOfMemoryError(f"attention of {tuple(q.shape)} could not be measured")
            result = self._prepare(place, args)
        else:
            try:
                result = run(args)
            except Exception as error:
                if capturing or run is torch_attention:  # no fallback is left, or the error broke the capture
                    raise
                result = self._without(place, error, args)
        return result.transpose(1, 2).contiguous()

    def report(self) -> list[dict[str, Any]]:
        """Return each known shape, as JSON, with its kernel and the milliseconds of all measured kernels."""
        return [
            {
                "device": device, "dtype": shape.dtype, "q": list(shape.q), "k": list(shape.k),
                "mask": list(shape.mask), "mask_dtype": shape.mask_dtype,
                "kernel": choice.chosen, "failed": dict(choice.failed),
                "milliseconds": {name: 1000 * seconds for name, seconds in choice.seconds.items()},
                "like": None if choice.like is None else list(choice.like),
            }
            for device, shape, choice in self._tuner
        ]  # fmt: skip

    def _prepare(self, place: tuple[str, Shape], args: AttentionArgs) -> torch.Tensor:
        """Answer the first call of a shape in this process: choose its kernel and run it."""
        device = args.q.device
        shape, kernels = place[1], self._kernels(device)
        if len(kernels) < 2:
            self._ready[place] = torch_attention
            return torch_attention(args)
        choice = self._tuner.get(*place)
        text = f"attention of {'x'.join(map(str, shape.q))}"
        with self._waiting(text):
            if choice is None or choice.chosen not in {"torch", *kernels}:
                try:
                    choice = self._like_neighbour(place, kernels, args)
                    choice = choice or self._measure(kernels, args)
                except LacksMemoryError:
                    return torch_attention(args)
                self._tuner.set(*place, choice)
                logger.debug("Resolute: %s: %s", text, choice)
            run = self._ready[place] = kernels.get(choice.chosen, torch_attention)
            if choice.chosen == CUDNN and args.mask is None:
                self.compile_ahead(*args[:3])
            try:
                return run(args)
            except Exception as error:
                if run is torch_attention:
                    raise
                return self._without(place, error, args)

    def compile_ahead(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Load cuDNN in a thread and compile its code for all sizes, so that no prompt waits for it. Does so once for
        each device, dtype and width.

        q, k, v: tensors like those of a later call; a trace's tensors will do.
        """
        layouts = [(each.shape[3], each.stride()[1:]) for each in (q, k, v)]
        kind = (q.device, q.dtype, q.shape[3])
        is_known = all(isinstance(size, int) for width, strides in layouts for size in (width, *strides))
        if is_known and kind not in self._kinds and CUDNN in self._kernels(q.device):
            self._kinds.add(kind)
            work = functools.partial(_compile_cudnn, *kind[:2], layouts)
            threading.Thread(target=work, name="resolute-cudnn", daemon=True).start()

    def _without(self, place: tuple[str, Shape], error: Exception, args: AttentionArgs) -> torch.Tensor:
        """Run torch's own choice in place of a failed kernel; later calls do so too, unless only memory was short."""
        if is_out_of_memory(error):
            return torch_attention(args)
        choice = self._tuner.get(*place) or Choice(chosen="torch")
        logger.warning("Resolute: attention with %s failed: %s", choice.chosen, first_line(error))
        failed = {**choice.failed, choice.chosen: first_line(error)}
        self._tuner.set(*place, Choice(failed=failed, chosen="torch"))
        self._ready[place] = torch_attention
        return torch_attention(args)

    def _like_neighbour(
        self, place: tuple[str, Shape], kernels: dict[str, Kernel], args: AttentionArgs
    ) -> Choice | None:
        """Return the choice of a nearby measured shape if its kernel is right for this shape too, else None."""
        near = nearest(place[1], self._tuner.on(place[0]))
        if near is None or near[1].chosen not in {"torch", *kernels}:
            return None
        kernel = kernels.get(near[1].chosen)
        if kernel is not None and _failure(kernel, _references(kernels, args)):
            return None
        return Choice(chosen=near[1].chosen, like=(near[0].q[2], near[0].k[2]))

    def _measure(self, kernels: dict[str, Kernel], args: AttentionArgs) -> Choice:
        """Measure the kernels and choose the first, unless another is clearly faster. Raises LacksMemoryError."""
        choice = Choice()
        references = _references(kernels, args)
        for name, kernel in kernels.items():
            if choice.seconds and (name == EFFICIENT or min(choice.seconds.values()) < _WORTH_SECONDS):
                continue
            if why := _failure(kernel, references):
                choice = replace(choice, failed={**choice.failed, name: why})
            else:
                choice = choice.with_run(name, self._seconds(functools.partial(kernel, args), args.q.device))
        return replace(choice, chosen=choice.fastest(_MARGIN) or "torch")


def _tuner(folder: Path | None) -> Tuner[Shape, Choice]:
    return Tuner("the choices of attention kernels", Shape, Choice, folder, machine_of)


def _compile_cudnn(device: torch.device, dtype: torch.dtype, layouts: Sequence[Layout]) -> None:
    try:
        compile_cudnn(device, dtype, layouts)
    except Exception as error:  # noqa: BLE001 (a prompt will wait, or fail with it)
        logger.debug("Resolute: cuDNN compiled nothing ahead: %s", error)


def _references(kernels: dict[str, Kernel], args: AttentionArgs) -> list[tuple[AttentionArgs, torch.Tensor]]:
    """Return test calls with their right results: the call itself and, if it has a mask, one with a fully masked row.

    Some kernels return NaN for such a row, and later masks of this shape may have one even if this mask does not.
    Raises LacksMemoryError: a call needs memory for one result, a test for two.
    """
    try:
        calls = [args] if args.mask is None else [args, args._replace(mask=with_masked_row(args.mask))]
        return [(call, _right_result(kernels, call)) for call in calls]
    except Exception as error:
        if is_out_of_memory(error):
            raise LacksMemoryError from error
        raise


def _right_result(kernels: dict[str, Kernel], args: AttentionArgs) -> torch.Tensor:
    """Flash's result, since ComfyUI prefers it and torch may choose cuDNN, which prepares each shape; else torch's."""
    if args.mask is None and FLASH in kernels:
        with contextlib.suppress(Exception):  # flash lacks this dtype or width; torch raises any other error too
            return kernels[FLASH](args)
    return torch_attention(args)


def _failure(kernel: Kernel, references: Sequence[tuple[AttentionArgs, torch.Tensor]]) -> str:
    """Return why a kernel cannot run or is wrong; empty if it is right. Raises LacksMemoryError."""
    try:
        right = all(agrees(kernel(call), expected) for call, expected in references)
    except Exception as error:
        if is_out_of_memory(error):
            raise LacksMemoryError from error
        return first_line(error)
    return "" if right else "its result differs from torch's"


chooser = shared("chooser", Chooser)


@functools.cache
def operator() -> Callable[..., torch.Tensor]:
    """`torch.ops.resolute.attention`: runs `chooser` on `AttentionArgs`'s fields; returns (batch, tokens, heads,
    width).
    """
    return defined("attention", _SCHEMA, lambda *args: chooser(AttentionArgs(*args)), _empty_result)


def _empty_result(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3]))
