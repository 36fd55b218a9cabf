"""Every flag that torch reads while it computes shows in the state, and goes from it when it is set back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from compile_cache.torch_facts.flags import autocast_state, compute_state, intercepting_mode

_MATMUL = torch.backends.cuda.matmul

# (name in the state, how to read it, how to set it, another value)
FLAGS: list[tuple[str, Callable[[], Any], Callable[[Any], Any], Any]] = [
    ("default dtype", torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    (
        "deterministic algorithms",
        torch.are_deterministic_algorithms_enabled,
        lambda value: torch.use_deterministic_algorithms(value),
        True,
    ),
    ("flash attention", torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    ("math attention", torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, False),
    (
        "memory-efficient attention",
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
        False,
    ),
    ("cudnn attention", torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp, False),
    (
        "reduced-precision math attention",
        torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp,
        True,
    ),
    ("float32 matmul", lambda: _MATMUL.allow_tf32, lambda value: setattr(_MATMUL, "allow_tf32", value), True),
    (
        "float32 convolution",
        lambda: torch.backends.cudnn.allow_tf32,
        lambda value: setattr(torch.backends.cudnn, "allow_tf32", value),
        False,
    ),
    (
        "fp16 accumulation",
        lambda: _MATMUL.allow_fp16_accumulation,
        lambda value: setattr(_MATMUL, "allow_fp16_accumulation", value),
        True,
    ),
    (
        "fp16 reduction",
        lambda: _MATMUL.allow_fp16_reduced_precision_reduction,
        lambda value: setattr(_MATMUL, "allow_fp16_reduced_precision_reduction", value),
        False,
    ),
    (
        "bf16 reduction",
        lambda: _MATMUL.allow_bf16_reduced_precision_reduction,
        lambda value: setattr(_MATMUL, "allow_bf16_reduced_precision_reduction", value),
        False,
    ),
    (
        "cudnn",
        lambda: torch.backends.cudnn.benchmark,
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
        True,
    ),
]


@pytest.mark.parametrize(("name", "read", "write", "other"), FLAGS, ids=[flag[0] for flag in FLAGS])
def test_a_flag_that_another_node_sets_is_part_of_the_state(
    name: str, read: Callable[[], Any], write: Callable[[Any], Any], other: Any
) -> None:
    state, before = compute_state("cuda"), read()
    assert other != before, "the test sets what is set already"
    write(other)
    try:
        assert [part for part, _ in set(compute_state("cuda")) - set(state)] == [name]
    finally:
        write(before)
    assert compute_state("cuda") == state


def test_autocast_counts_on_its_own_device_only() -> None:
    outside = compute_state("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_state("cpu") == "torch.bfloat16"
        assert autocast_state("cuda") == "off"
        assert compute_state("cpu") != outside
        with torch.autocast("cpu", enabled=False):
            assert compute_state("cpu") == outside
    assert compute_state("cpu") == outside


class _SeesFunctions(TorchFunctionMode):
    """Another pack's mode."""


class _SeesOperations(TorchDispatchMode):
    """Another pack's mode."""


@pytest.mark.parametrize("mode", [_SeesFunctions, _SeesOperations])
def test_a_mode_that_sees_every_operation_is_named(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    assert intercepting_mode() is None
    with mode():
        assert intercepting_mode() == mode.__name__  # type: ignore[attr-defined]
    assert intercepting_mode() is None


def test_the_default_device_is_part_of_the_state_and_no_mode_of_another_pack() -> None:
    state = compute_state("cpu")
    with torch.device("meta"):
        assert intercepting_mode() is None
        assert compute_state("cpu") != state
    assert compute_state("cpu") == state
