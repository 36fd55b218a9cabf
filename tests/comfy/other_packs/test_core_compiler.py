"""Core's own compiler (ComfyUI 0.34 and later) and ours never record inside each other."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from .conftest import Bench
from .packs import CoreCompiler

STEPS = 3


@pytest.fixture
def compiler(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[CoreCompiler]:
    args = core.comfy.cli_args.args
    monkeypatch.setattr(args, "disable_comfy_compiler", False, raising=False)
    monkeypatch.setattr(args, "disable_cuda_graphs", False, raising=False)
    found = CoreCompiler(args)
    monkeypatch.setitem(sys.modules, "comfy.model_prefetch", found.module)
    yield found
    assert not args.disable_comfy_compiler and not args.disable_cuda_graphs, "the switches were not put back"


@pytest.fixture
def ours_ran(bench: Bench, compiler: CoreCompiler, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call of our programs (what would compile and capture), whether core's compiler recorded meanwhile."""
    seen: list[bool] = []
    cache = type(bench.core.ours("process.runtime").cache())
    run = cache.run

    def watched(self: Any, program: Any, call: Any, *args: Any) -> Any:
        if not call.policy.is_eager:
            seen.append(compiler.is_recording)
        return run(self, program, call, *args)

    monkeypatch.setattr(cache, "run", watched)
    return seen


def records_around(network: Any, method: str, compiler: CoreCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family in which core's compiler begins to record in `method`: H3 in `forward`, Qwen-Image 2.1 in `_forward`."""
    kind = type(network)
    own = getattr(kind, method)

    @functools.wraps(own)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        with compiler.recording():
            return own(self, *args, **kwargs)

    monkeypatch.setattr(kind, method, recorded)


@pytest.mark.parametrize("method", ["forward", "_forward"])
def test_a_sampling_run_of_ours_is_left_to_our_compiler(
    bench: Bench, compiler: CoreCompiler, ours_ran: list[bool], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    model = bench.model()
    expected = bench.sample(model)
    records_around(model.model.diffusion_model, method, compiler, monkeypatch)
    assert torch.equal(bench.sample(bench.compiled(model)), expected)
    assert ours_ran == [False] * STEPS
    assert compiler.events == ["off"] * STEPS


def test_a_run_without_ours_keeps_cores_compiler(
    bench: Bench, compiler: CoreCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bench.model()
    bench.sample(bench.compiled(model))
    records_around(model.model.diffusion_model, "forward", compiler, monkeypatch)
    bench.sample(model)
    assert compiler.events == ["begin", "end"] * STEPS


def test_a_run_that_fails_puts_the_switches_back(bench: Bench, compiler: CoreCompiler) -> None:
    model = bench.compiled(bench.model())

    def fail(*args: Any, **kwargs: Any) -> Any:
        assert compiler.args.disable_comfy_compiler
        raise ValueError("a pack's own")

    model.add_wrapper("diffusion_model", fail)
    with pytest.raises(ValueError, match="a pack's own"):
        bench.sample(model)


def test_a_call_inside_a_recording_runs_eagerly_and_says_why(
    bench: Bench, compiler: CoreCompiler, ours_ran: list[bool]
) -> None:
    vae = bench.vae()
    expected = bench.decode(vae)
    ours = bench.compiled_vae(vae)
    before = bench.stats.counters.bypasses["core_compiler"]
    with compiler.recording():
        assert torch.equal(bench.decode(ours), expected)
        assert compiler.is_recording, "the recording of core's was ended"
    assert ours_ran == []
    assert bench.stats.counters.bypasses["core_compiler"] == before + 1
    assert "ComfyUI's own compiler is recording" in bench.caplog.text
    assert torch.equal(bench.decode(ours), expected)
    assert ours_ran == [False]
