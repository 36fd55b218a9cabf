"""Unmodified onediff 1.2.0 on public OneFlow 0.9.0 converts ComfyUI's modules and leaves no trace in the process."""

from __future__ import annotations

import builtins
import gc
import importlib
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from compile_cache.backends.oneflow.backend import OneFlowBackend
from compile_cache.backends.oneflow.packages import installed

from .public_oneflow import supply
from .rig import TOLERANCE, Bound, decoder, random, unet, unet_inputs


def bound_to_onediff(module: Any, method: str = "forward") -> Bound:
    """Bind a call of the module's method with its tensors in order."""
    return Bound(
        module,
        lambda tensors: getattr(type(module), method)(module, *tensors),
        backend=OneFlowBackend("onediff"),
        method=method,
    )


def state_of_the_process(names: Iterable[str] = ()) -> dict[str, Any]:
    """Module identities and settings of the process. names: limit the modules to these."""
    packages = ("torch", "comfy", "numpy", "diffusers", "tests")
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in packages}
    assert all("oneflow" not in str(type(module)) for module in modules.values())
    return {
        "modules": {name: id(module) for name, module in modules.items() if not names or name in names},
        "variables": dict(os.environ),
        "path": list(sys.path),
        "finders": list(sys.meta_path),
        "hasattr": builtins.hasattr,
        "exit": sys.exit,
        "hook": sys.excepthook,
        "filters": list(warnings.filters),
    }


@pytest.fixture(scope="module", autouse=True)
def _supplied() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        supply(patched)
        yield


@pytest.fixture(scope="module")
def model(comfy: None) -> Any:
    return unet()


@pytest.fixture(scope="module")
def bound(model: Any) -> Bound:
    return bound_to_onediff(model, "_forward")


def test_the_compatibility_layer_is_tested_with_its_versions() -> None:
    assert (installed().oneflow, installed().onediff) == ("0.9.0", "1.2.0")


def test_weights_and_graphs_of_a_deleted_module_are_freed(comfy: None) -> None:
    """Must be the first conversion of this process, because that one imports everything."""
    module = decoder()
    memory = numpy.zeros(tuple(module.conv_out.weight.shape), numpy.float32)
    freed = weakref.ref(memory)
    module.conv_out.weight = nn.Parameter(torch.from_numpy(memory), requires_grad=False)
    bound = bound_to_onediff(module)
    bound(random(1, 4, 8, 8))
    ((_, entry),) = bound.cache._captures
    graph = weakref.ref(entry.value._graph)  # type: ignore[attr-defined]
    del entry
    bound.close()
    del module, memory, bound.program, bound.invoke
    gc.collect()
    assert graph() is None
    assert freed() is None


class TestTheUNet:
    def test_its_conversion_leaves_the_process_unchanged(self, bound: Bound) -> None:
        before = state_of_the_process()
        with bound.expect(captures=1, graph_calls=1):
            bound(*unet_inputs(256, 192))
        assert state_of_the_process(before["modules"]) == before

    def test_is_right_at_a_size_that_failed_with_onediff_and_back(self, bound: Bound) -> None:
        for size in ((256, 192), (960, 720), (256, 192)):
            bound(*unet_inputs(*size))
            with bound.expect(replays=1):
                assert bound.error(*unet_inputs(*size)) <= TOLERANCE

    def test_uses_replaced_weights_and_never_writes_to_the_originals(self, bound: Bound, model: Any) -> None:
        layer = model.input_blocks[0][0]
        backup, kept = layer.weight, layer.weight.clone()
        for seed in (5, 6, 7):
            layer.weight = nn.Parameter(random(*kept.shape, seed=seed), requires_grad=False)
            bound.changed()
            for _ in range(2):
                assert bound.error(*unet_inputs(256, 192)) <= TOLERANCE
        assert torch.equal(backup, kept)
        layer.weight = backup
        bound.changed()
        with bound.expect(replays=1):
            assert bound.error(*unet_inputs(256, 192)) <= TOLERANCE

    def test_keeps_the_hooks_on_the_module(self, model: Any) -> None:
        assert not model._load_state_dict_post_hooks
        assert not [name for name in vars(model) if "onediff" in name]


def test_the_decoder_is_right_at_two_sizes(comfy: None) -> None:
    module = decoder()
    bound = bound_to_onediff(module)
    for latent in (random(1, 4, 9, 6), random(2, 4, 7, 7)):
        bound(latent)
        with bound.expect(replays=1):
            assert bound.error(latent) <= TOLERANCE


def test_a_patched_module_is_converted_by_its_class(comfy: None) -> None:
    module = decoder()
    vars(module)["forward"] = lambda *_: pytest.fail("the hook was converted")
    bound = bound_to_onediff(module)
    bound(random(1, 4, 8, 8))
    assert bound.cache.stats.counters.captures == 1
    assert "forward" in vars(module)


def test_a_call_that_is_not_a_method_of_the_module_is_refused_with_its_reason(model: Any) -> None:
    bound = Bound(model, lambda tensors: tensors[0] * 2, backend=OneFlowBackend("onediff"))
    bound(random(1, 4))
    assert "a module's own method" in bound.bypasses[0]


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with an operator that OneFlow lacks, in a package that a conversion can import again."""
    (tmp_path / "odd_package.py").write_text(
        "import torch\nclass Odd(torch.nn.Module):\n    def forward(self, x):\n        return torch.special.i0(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("odd_package").Odd()


def test_a_module_that_it_cannot_run_is_refused_and_the_process_is_unchanged(odd: Any) -> None:
    before = state_of_the_process()
    bound = bound_to_onediff(odd)
    assert torch.equal(bound(random(2, 3)), bound.original(random(2, 3)))
    assert "OneFlow has no torch.special.i0" in bound.bypasses[0]
    assert state_of_the_process(before["modules"]) == before


def test_other_threads_keep_the_real_torch(bound: Bound, in_parallel: Callable[..., Any]) -> None:
    results = in_parallel(lambda: float(torch.ones(3).sum()))
    bound(*unet_inputs(128, 128))
    assert set(results()) == {3.0}


@pytest.fixture
def in_parallel() -> Callable[..., Any]:
    """Start a thread that calls a function repeatedly; the returned function stops it and returns the results."""

    def start(function: Callable[[], Any]) -> Callable[[], list[Any]]:
        found: list[Any] = []
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                found.append(function())
                stop.wait(0.01)

        thread = threading.Thread(target=work)
        thread.start()

        def results() -> list[Any]:
            stop.set()
            thread.join()
            return found

        return results

    return start
