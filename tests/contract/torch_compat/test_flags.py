"""Every flag that torch reads while it computes is found, and found again in a worker process."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from compile_cache.backends.inductor.compiler import job
from compile_cache.torch_compat import flags as flags_of_torch
from compile_cache.torch_compat.flags import autocast_state, intercepting_mode, torch_flags

from ...programs import run_python

_CUDA: Any = torch.backends.cuda


def other_than(value: Any) -> Any:
    """Another value of a flag. ComfyUI sets some when it is imported, as other tests of this process do, so no value is
    always another one.
    """
    return torch.float64 if value is torch.float32 else not value


def attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


# (name among the flags, how to read it, how to set it)
FLAGS: list[tuple[str, Callable[[], Any], Callable[[Any], Any]]] = [
    ("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("deterministic algorithms", torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    ("flash attention", _CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp),
    ("math attention", _CUDA.math_sdp_enabled, _CUDA.enable_math_sdp),
    ("memory-efficient attention", _CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    ("cudnn attention", _CUDA.cudnn_sdp_enabled, _CUDA.enable_cudnn_sdp),
    (
        "reduced-precision math attention",
        _CUDA.fp16_bf16_reduction_math_sdp_allowed,
        _CUDA.allow_fp16_bf16_reduction_math_sdp,
    ),
    ("float32 matmul", *attribute(_CUDA.matmul, "allow_tf32")),
    ("float32 convolution", *attribute(torch.backends.cudnn, "allow_tf32")),
    ("fp16 accumulation", *attribute(_CUDA.matmul, "allow_fp16_accumulation")),
    ("fp16 reduction", *attribute(_CUDA.matmul, "allow_fp16_reduced_precision_reduction")),
    ("bf16 reduction", *attribute(_CUDA.matmul, "allow_bf16_reduced_precision_reduction")),
    ("cudnn", *attribute(torch.backends.cudnn, "benchmark")),
]


@pytest.mark.parametrize(("name", "read", "write"), FLAGS, ids=[flag[0] for flag in FLAGS])
def test_a_flag_that_another_node_sets_is_found_by_name(
    name: str, read: Callable[[], Any], write: Callable[[Any], Any]
) -> None:
    flags, before = torch_flags("cuda"), read()
    write(other_than(before))
    try:
        assert [part for part, _ in set(torch_flags("cuda")) - set(flags)] == [name]
    finally:
        write(before)
    assert torch_flags("cuda") == flags


def test_so_is_the_newer_switch_of_tf32() -> None:
    """Torch 2.9 and newer have it."""
    switches = {"float32 matmul": _CUDA.matmul, "float32 convolution": getattr(torch.backends.cudnn, "conv", None)}
    for name, switch in switches.items() if hasattr(_CUDA.matmul, "fp32_precision") else ():
        flags, before = torch_flags("cuda"), switch.fp32_precision
        switch.fp32_precision = other = "ieee" if dict(flags)[name] == "tf32" else "tf32"
        try:
            assert set(torch_flags("cuda")) - set(flags) == {(name, other)}
        finally:
            switch.fp32_precision = before


def test_autocast_counts_on_its_own_device_only() -> None:
    outside = torch_flags("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_state("cpu") == "torch.bfloat16"
        assert autocast_state("cuda") == "off"
        assert torch_flags("cpu") != outside
        with torch.autocast("cpu", enabled=False):
            assert torch_flags("cpu") == outside
    assert torch_flags("cpu") == outside


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


def test_the_default_device_is_among_the_flags_and_no_mode_of_another_pack() -> None:
    flags = torch_flags("cpu")
    with torch.device("meta"):
        assert intercepting_mode() is None
        assert torch_flags("cpu") != flags
    assert torch_flags("cpu") == flags


# --- workers ---------------------------------------------------------------------------------------------------

OF_LOWERING = {
    "deterministic algorithms", "float32 matmul", "float32 convolution", "fp16 reduction", "bf16 reduction",
    "fp16 accumulation",
}  # fmt: skip
WORKER = """
import json, pickle, sys
from compile_cache.backends.inductor.compiler import job
from compile_cache.torch_compat.flags import torch_flags
job._run = lambda _: job.Artifact("key", "label", {"flags": dict(torch_flags("cuda"))}, b"")
made, _ = job.work(pickle.loads(bytes.fromhex(sys.stdin.read())))
print(json.dumps(made["about"]["flags"] if isinstance(made, dict) else {"failed": made}))
"""


def test_a_worker_lowers_under_the_flags_of_the_main_process() -> None:
    with contextlib.ExitStack() as undo:
        for name, read, write in FLAGS:
            if name in OF_LOWERING:
                undo.callback(write, before := read())
                write(other_than(before))
        settings, flags = job.settings_for(torch.device("cpu")), dict(torch_flags("cuda"))
    usual = dict(torch_flags("cuda"))
    assert {name for name in flags if flags[name] != usual[name]} == OF_LOWERING
    region = vars(job.Job("key", "label", b"", (), True, settings))
    there = json.loads(run_python(WORKER, given=pickle.dumps(region).hex()).splitlines()[-1])
    assert there.get("deterministic algorithms") == 1, there  # it warns where the main process raises
    assert {name: there[name] for name in OF_LOWERING - {"deterministic algorithms"}} == {
        name: flags[name] for name in OF_LOWERING - {"deterministic algorithms"}
    }


def test_a_worker_that_does_not_take_a_flag_over_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda value: None)
    wanted = flags_of_torch.flags_for_workers()
    flags_of_torch.apply_flags(wanted)
    with pytest.raises(RuntimeError, match="'threads': 99"):
        flags_of_torch.apply_flags({**wanted, "threads": 99})
