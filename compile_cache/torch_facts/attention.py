"""Attention as one operator that runs the fastest kernel for each shape (RESOLUTE_ATTENTION=measured).

A trace fixes the kernel when a region is compiled, and the region serves every shape. Which kernel is fastest depends
on the shape, so the operator chooses when it runs. It calls the kernels themselves, because torch's switch between them
(`sdpa_kernel`) holds for the whole process.
"""

from __future__ import annotations

import functools
import importlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch

from ..errors import first_line
from .out_of_memory import is_out_of_memory

logger = logging.getLogger(__name__)

# q, k, v: (batch, heads, tokens, width), and the scale. The result has the shape of q, with the width of v.
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "float | None"], torch.Tensor]
# Device, dtype, shapes of q and k, width of v, and torch's switches.
Key = tuple[str, str, tuple[int, ...], tuple[int, ...], int, tuple[bool, ...]]

_OPERATOR = "resolute::attention"
_RUNS = 5  # that are timed together
_MARGIN = 0.9  # a kernel has to be so much faster than the first one: times vary, and so would pictures
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}  # relative to torch's own choice
_TOLERANCE_OF_OTHERS = 1e-4

_aten = torch.ops.aten


def torchs_choice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    result: torch.Tensor = _aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)[0]
    return result


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    result: torch.Tensor = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, False, scale=scale)[0]
    return result


def _efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    result: torch.Tensor = _aten._scaled_dot_product_efficient_attention(q, k, v, None, False, scale=scale)[0]
    return result


def _flash_3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    """FlashAttention 3, which is a package of its own, for Hopper."""
    attention = importlib.import_module("flash_attn_interface").flash_attn_func
    result: Any = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), softmax_scale=scale)
    tokens: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return tokens.transpose(1, 2)


def kernels_for(device: torch.device) -> dict[str, Kernel]:
    """The kernels to choose from, the preferred one first. Empty where torch chooses among its own: on a CPU."""
    if device.type != "cuda":
        return {}
    # People switch one off where it is wrong.
    switched: dict[str, Kernel] = {"flash": _flash, "efficient": _efficient, "cudnn": _cudnn}
    kernels = {name: kernel for (name, kernel), is_on in zip(switched.items(), _switches(), strict=False) if is_on}
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    if "flash" in kernels and is_hopper and find_spec("flash_attn_interface") is not None:
        kernels["flash 3"] = _flash_3
    return kernels


def _switches() -> tuple[bool, ...]:
    """Whether torch may use flash, efficient, cuDNN's and plain attention, and whether results must be reproducible."""
    cuda: Any = torch.backends.cuda
    switches = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.cudnn_sdp_enabled, cuda.math_sdp_enabled)
    return (*(is_on() for is_on in switches), torch.are_deterministic_algorithms_enabled())


@dataclass(frozen=True)
class Choice:
    """kernel: its name, "torch" for what torch chooses itself. failed: why a kernel cannot run, by its name."""

    kernel: str = "torch"
    run: Kernel = torchs_choice
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    lacked_memory: bool = False  # to measure


class Chooser:
    """Runs attention with the kernel that was fastest for the shape, which it measures at the shape's first call.

    It never measures while a CUDA graph is recorded. A kernel that fails is left out, and torch's own choice takes its
    place. seconds: measures one run on a device.
    """

    def __init__(
        self,
        seconds: Callable[[Callable[[], object], torch.device], float] | None = None,
        kernels: Callable[[torch.device], dict[str, Kernel]] = kernels_for,
    ) -> None:
        self._seconds = seconds or seconds_of
        self._kernels = kernels
        self._choices: dict[Key, Choice] = {}

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
        """The result as (batch, tokens, heads, width), contiguous. Raises what torch's own choice raises."""
        key = (str(q.device), str(q.dtype), tuple(q.shape), tuple(k.shape), int(v.shape[-1]), _switches())
        capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
        choice = self._choices.get(key)
        if choice is None and not capturing:
            choice = self._measure(q, k, v, scale)
            if not choice.lacked_memory:
                self._choices[key] = choice
        choice = choice or Choice()
        try:
            result = choice.run(q, k, v, scale)
        except Exception as error:
            if capturing or choice.run is torchs_choice:  # nothing can take its place; a capture that it broke is lost
                raise
            logger.warning("Resolute: attention with %s failed: %s", choice.kernel, first_line(error))
            self._choices[key] = Choice(failed={**choice.failed, choice.kernel: first_line(error)})
            result = torchs_choice(q, k, v, scale)
        return result.transpose(1, 2).contiguous()

    def report(self) -> list[dict[str, Any]]:
        """Each shape that was met, as JSON, with its kernel and the milliseconds of all."""
        return [
            {
                "device": device, "dtype": dtype, "q": list(q), "k": list(k), "kernel": choice.kernel,
                "milliseconds": dict(choice.milliseconds), "failed": dict(choice.failed),
            }
            for (device, dtype, q, k, *_), choice in list(self._choices.items())
        ]  # fmt: skip

    def _measure(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> Choice:
        kernels = self._kernels(q.device)
        if len(kernels) < 2:
            return Choice()
        milliseconds: dict[str, float] = {}
        failed: dict[str, str] = {}
        expected = torchs_choice(q, k, v, scale)
        for name, kernel in kernels.items():
            try:
                if not _agrees(kernel(q, k, v, scale), expected):
                    failed[name] = "its result differs from torch's"
                else:
                    run = functools.partial(kernel, q, k, v, scale)
                    milliseconds[name] = 1000 * self._seconds(run, q.device)
            except Exception as error:  # noqa: BLE001 (whatever it is, another kernel runs)
                if is_out_of_memory(error):
                    return Choice(lacked_memory=True)
                failed[name] = first_line(error)
        best = min(milliseconds, key=lambda name: milliseconds[name], default="torch")
        first = next(iter(milliseconds), best)
        if first != best and milliseconds[best] > _MARGIN * milliseconds[first]:
            best = first
        logger.debug("Resolute: attention %s of %s: %s, %s", best, tuple(q.shape), milliseconds, failed)
        return Choice(best, kernels.get(best, torchs_choice), milliseconds, failed)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """The seconds of one run, after at least one earlier one. Waits for the GPU."""
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    with torch.cuda.device(device):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        for _ in range(_RUNS):
            run()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / 1000 / _RUNS


def _agrees(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    tolerance = _TOLERANCE.get(expected.dtype, _TOLERANCE_OF_OTHERS)
    exact = torch.promote_types(expected.dtype, torch.float32)
    norms = [torch.linalg.vector_norm(each, dtype=exact) for each in (actual - expected, expected)]
    return bool(norms[0] <= tolerance * norms[1])


chooser = Chooser()


@functools.cache
def operator() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float | None], torch.Tensor]:
    """`torch.ops.resolute.attention`, which runs `chooser`. It must be there before a graph with it is loaded.

    The first copy of this pack in a process defines it.
    """
    if not hasattr(torch.ops.resolute, "attention"):
        torch.library.define(_OPERATOR, "(Tensor q, Tensor k, Tensor v, float? scale) -> Tensor")
        torch.library.impl(_OPERATOR, ("cpu", "cuda"), lambda q, k, v, scale: chooser(q, k, v, scale))
        torch.library.register_fake(_OPERATOR, _empty_result)
    found: Callable[..., torch.Tensor] = torch.ops.resolute.attention.default
    return found


def _empty_result(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3]))
