"""The compiler `onediff`: what Resolute does with a module that onediff converted.

onediff 1.2.0 needs a OneFlow of its own, which no index has. So a conversion of one module, written by hand, stands in
for it; the graph that runs is the real OneFlow's.
"""

from __future__ import annotations

import gc
import sys
import types
import weakref
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from compile_cache.backends.oneflow.backend import OneFlowBackend
from compile_cache.backends.oneflow.packages import oneflow

from .rig import TOLERANCE, Bound, Layers, random, rows, with_weights


class Parts(Layers):
    """Its work is in `_forward`, as that of ComfyUI's UNet."""

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pytest.fail("another method was called")


class Onediff:
    """`onediff.infer_compiler`. It leaves a hook at the module that it gets, and counts its conversions."""

    def __init__(self) -> None:
        self.conversions = 0

    def oneflow_compile(self, module: Any) -> Any:
        self.conversions += 1
        if not isinstance(module, Parts):
            raise NotImplementedError("OneFlow has no torch.special.i0\nand more")
        assert not {"forward", "_forward"} & set(vars(module)), "a hook would be converted"
        module._load_state_dict_post_hooks[0] = module.onediff_hook = lambda *_: None
        return types.SimpleNamespace(_deployable_module_model=types.SimpleNamespace(oneflow_module=converted()))


def converted() -> Any:
    """`Parts` in OneFlow, with weights of its own."""
    flow = oneflow()

    class Converted(flow.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (flow.nn.Linear(Layers.width, Layers.width) for _ in range(2))
            self.register_buffer("offset", flow.zeros(Layers.width))

        def _forward(self, x: Any) -> Any:
            return self.second(flow.nn.functional.silu(self.first(x))) + self.offset

    return Converted()


@pytest.fixture(autouse=True)
def onediff(monkeypatch: pytest.MonkeyPatch) -> Onediff:
    package, onediff = types.ModuleType("onediff"), Onediff()
    monkeypatch.setitem(sys.modules, "onediff", package)
    monkeypatch.setitem(sys.modules, "onediff.infer_compiler", onediff)
    return onediff


def bind(module: Any, method: str = "_forward") -> Bound:
    """A call of the module's method with its tensors in order."""
    kind = type(module)
    kept = weakref.ref(module)
    return Bound(
        module,
        lambda tensors: getattr(kind, method)(kept(), *tensors),
        backend=OneFlowBackend("onediff"),
        method=method,
    )


@pytest.fixture
def layers() -> Any:
    return with_weights(Parts())


def test_one_conversion_is_right_at_every_size(layers: Any, onediff: Onediff) -> None:
    bound = bind(layers)
    with bound.expect(captures=2, graph_calls=2):
        bound(rows(2))
        bound(rows(5))
    with bound.expect(replays=3):
        for number in (2, 5, 2):
            assert bound.error(rows(number)) <= TOLERANCE
    assert onediff.conversions == 1


def test_it_uses_replaced_weights_and_never_writes_to_the_originals(layers: Any, onediff: Onediff) -> None:
    bound, backup = bind(layers), layers.first.weight
    kept = backup.clone()
    for seed in (5, 6, 7):
        layers.first.weight = nn.Parameter(random(*kept.shape, seed=seed) / Layers.width**0.5, requires_grad=False)
        bound.changed()
        for _ in range(2):
            assert bound.error(rows(2)) <= TOLERANCE
    assert torch.equal(backup, kept)
    layers.first.weight = backup
    bound.changed()
    with bound.expect(replays=1):
        assert bound.error(rows(2)) <= TOLERANCE
    assert onediff.conversions == 1


def test_a_patched_module_is_converted_by_its_class_and_gets_no_hook(layers: Any, onediff: Onediff) -> None:
    vars(layers)["_forward"] = patch = lambda *_: pytest.fail("the patch was called")
    before = dict(vars(layers))
    bound = bind(layers)
    with bound.expect(captures=1, graph_calls=1):
        bound(rows(2))
    assert (onediff.conversions, vars(layers), layers._forward) == (1, before, patch)
    assert not layers._load_state_dict_post_hooks


def test_weights_and_graphs_of_a_deleted_module_are_freed(layers: Any) -> None:
    memory = numpy.zeros((Layers.width, Layers.width), numpy.float32)
    freed = weakref.ref(memory)
    module = with_weights(Parts())
    module.first.weight = nn.Parameter(torch.from_numpy(memory), requires_grad=False)
    bound = bind(module)
    with bound.expect(captures=1, graph_calls=1):
        bound(rows(2))
    bound.close()
    del module, memory, bound.program, bound.invoke
    gc.collect()
    assert freed() is None


class Odd(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.i0(x)


def test_a_module_that_onediff_cannot_convert_runs_eagerly_with_the_reason() -> None:
    bound = bind(module := Odd(), "forward")
    assert torch.equal(bound(rows(2)), module(rows(2)))
    assert "onediff cannot convert Odd: OneFlow has no torch.special.i0" in bound.bypasses[0]


def test_a_call_that_is_not_a_method_of_the_module_is_refused_with_its_reason(layers: Any) -> None:
    bound = Bound(layers, lambda tensors: tensors[0] * 2, backend=OneFlowBackend("onediff"))
    bound(random(1, 4))
    assert "a module's own method" in bound.bypasses[0]
