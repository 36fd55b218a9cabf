"""Weights of a region: read anew at each call, and never run by code that was compiled for other ones."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import pytest
import torch
from torch import nn

from ....rig import TOLERANCE, Bound, Convolution, Model, Rig, inputs, random, relative_error, seeded


class CastingConv2d(nn.Conv2d):
    """Casts its weights to its input on the way, like ComfyUI's operations."""

    comfy_cast_weights = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class CastingConvolution(Convolution):
    def __init__(self) -> None:
        super().__init__(16)
        self.conv = CastingConv2d(16, 16, 3, padding=1)


class Offloading(Convolution):
    """Manages without its weights while they are elsewhere."""

    def __init__(self) -> None:
        super().__init__(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.conv.weight.is_meta else super().forward(x)


class TestWeights:
    def test_a_rebound_parameter_takes_effect_at_once(self, rig: Rig, warm: Bound) -> None:
        bound = rig.bind(seeded(Model))
        before = bound(*inputs())
        conv = bound.module.convolutions[0].conv
        conv.weight = nn.Parameter(conv.weight.detach() * 3, requires_grad=False)
        with rig.expect(region_calls=4, graph_calls=1):
            after = bound(*inputs())
        assert relative_error(after, before) > 0.01
        with torch.inference_mode():
            assert relative_error(after, bound.module(*inputs())) <= TOLERANCE

    def test_data_written_in_place_takes_effect_at_once(self, rig: Rig, warm: Bound) -> None:
        bound = rig.bind(seeded(Model))
        bound(*inputs())
        with torch.no_grad():
            bound.module.attentions[1].out.weight.mul_(5)
        with rig.expect(region_calls=4, graph_calls=1):
            assert bound.error(*inputs()) <= TOLERANCE

    def test_a_parameter_rebound_with_another_dtype_gets_another_artifact(self, cold: Rig) -> None:
        bound = cold.bind(seeded(lambda: Convolution(16)))
        bound(random(2, 16, 8, 8))
        bound.module.to(torch.bfloat16)
        bound.weights_moved()
        assert bound.error(random(2, 16, 8, 8, dtype=torch.bfloat16)) <= 1e-2
        fresh = cold.bind(seeded(lambda: Convolution(16)))
        with cold.expect(region_calls=1, graph_calls=1, verifications=ANY):
            assert fresh.error(random(2, 16, 12, 8)) <= TOLERANCE

    def test_a_weight_that_the_block_casts_may_come_back_in_another_dtype(self, cold: Rig) -> None:
        bound = cold.bind(seeded(CastingConvolution))
        x = random(2, 16, 8, 8)
        assert bound.error(x) <= TOLERANCE
        conv = bound.module.conv
        conv.weight = nn.Parameter(conv.weight.detach().to(torch.float16), requires_grad=False)
        bound.weights_moved()
        assert bound.error(x) <= TOLERANCE

    def test_weights_of_another_dtype_at_a_later_call_of_the_same_epoch_get_their_own_region(self, cold: Rig) -> None:
        """Paged weights: in place they have their file's dtype, and block by block the dtype of the computation."""
        bound = cold.bind(seeded(CastingConvolution))
        x, conv = random(2, 16, 8, 8), bound.module.conv
        assert bound.error(x) <= TOLERANCE
        parameters = dict(conv._parameters)
        conv._parameters.update({name: each.detach().to(torch.float16) for name, each in parameters.items()})
        with cold.expect(region_compiles=1, verifications=1, region_calls=1, graph_calls=1):
            assert bound.error(x) <= TOLERANCE
        conv._parameters.update(parameters)
        with cold.expect(region_calls=1, graph_calls=1):
            assert bound.error(x) <= TOLERANCE

    @pytest.mark.parametrize(
        "change",
        [
            lambda model: setattr(model.convolutions[0], "conv", seeded(lambda: nn.Conv2d(16, 16, 3, padding=1), 9)),
            lambda model: setattr(model.convolutions[0].conv, "forward", lambda x: x * 2),
            lambda model: setattr(model.attentions[0].norm, "eps", 0.5),
        ],
        ids=["submodule", "forward inside a block", "setting"],
    )
    def test_what_is_exchanged_after_the_first_run_takes_effect(self, rig: Rig, warm: Bound, change: Any) -> None:
        bound = rig.bind(seeded(Model))
        bound(*inputs())
        change(bound.module)
        bound.weights_moved()
        assert bound.error(*inputs()) <= TOLERANCE

    @pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
    def test_a_class_that_a_pack_patched_runs_as_patched_and_is_never_kept(
        self, cold: Rig, monkeypatch: pytest.MonkeyPatch, before: bool
    ) -> None:
        bound = cold.bind(seeded(Model))
        if not before:
            bound(*inputs())
        with monkeypatch.context() as patched:
            patched.setattr(nn.GroupNorm, "forward", lambda self, x: x * 2)
            bound.weights_moved()
            assert bound.error(*inputs(3)) <= TOLERANCE
            replaced = "another pack replaced torch.nn.modules.normalization.GroupNorm.forward; Convolution blocks run"
            assert any(replaced in detail for detail in cold.details)
        bound.weights_moved()
        assert bound.error(*inputs(2, 9, 7)) <= TOLERANCE
        assert cold.cache.stats.counters.region_compiles == 2

    @pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
    def test_inference_mode_and_no_grad_are_served_by_one_artifact(self, cold: Rig, first: Any) -> None:
        bound = cold.bind(seeded(Model))
        bound.mode = first
        bound(*inputs())
        for mode in (torch.no_grad, torch.inference_mode):
            bound.mode = mode
            with cold.expect(region_calls=4, graph_calls=1, verifications=ANY):
                assert bound.error(*inputs(3)) <= TOLERANCE
            assert bound(*inputs()).is_inference() == (mode is torch.inference_mode)

    def test_weights_made_in_inference_mode_are_served_too(self, rig: Rig, warm: Bound) -> None:
        with torch.inference_mode():
            module = seeded(Model, seed=2)
        with rig.expect(region_calls=4, graph_calls=1):
            assert rig.bind(module).error(*inputs()) <= TOLERANCE


class TestWeightsThatNoRegionTakes:
    """Weights that are elsewhere, patched or of another layout: the original runs, and a bypass says which."""

    @pytest.fixture
    def bound(self, rig: Rig, warm: Bound) -> Bound:
        return rig.bind(seeded(lambda: Convolution(16)))

    def streamed(self, rig: Rig, bound: Bound) -> None:
        bound.weights_moved()
        with rig.expect({"streamed_weights": 2}, eager_calls=2):
            for _ in range(2):
                assert bound.error(random(2, 16, 8, 8)) == 0
        assert "low VRAM" in rig.details[-1]

    @pytest.mark.parametrize("name", ["weight_function", "bias_function"])
    def test_a_weight_patched_on_its_way_in(self, rig: Rig, bound: Bound, name: str) -> None:
        bound.module.conv.comfy_cast_weights = False
        other = rig.bind(bound.module)
        setattr(bound.module.conv, name, [lambda weight: weight * 2])
        self.streamed(rig, other)

    def test_a_weight_of_a_foreign_class(self, rig: Rig, bound: Bound) -> None:
        class Quantized(nn.Parameter):
            pass

        bound.module.conv.weight = Quantized(bound.module.conv.weight.detach(), requires_grad=False)
        bound.weights_moved()
        with rig.expect({"unreadable_weights": 1}, eager_calls=1):
            assert bound.error(random(2, 16, 8, 8)) == 0
        assert "a weight is a Quantized, whose layout Resolute does not know" in rig.details[-1]

    def test_a_weight_on_another_device(self, rig: Rig, warm: Bound) -> None:
        bound = rig.bind(seeded(Offloading))
        conv = bound.module.conv
        conv.weight = nn.Parameter(conv.weight.detach().to("meta"), requires_grad=False)
        self.streamed(rig, bound)

    def test_weights_that_came_back_run_compiled_again(self, rig: Rig, bound: Bound) -> None:
        bound.module.conv.comfy_cast_weights = False
        other = rig.bind(bound.module)
        bound.module.conv.weight_function = [lambda weight: weight]
        self.streamed(rig, other)
        bound.module.conv.weight_function = []
        other.weights_moved()
        with rig.expect(region_calls=1, graph_calls=1):
            assert other.error(random(2, 16, 8, 8)) <= TOLERANCE
