"""Regions: the same compiled code for every size and every module of a structure, with right results."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import ANY

import pytest
import torch
import torch._dynamo.utils

from compile_cache.modules.site import Hook

from ....rig import TOLERANCE, Attention, Bound, Convolution, Model, Rig, inputs, random, relative_error, seeded

# Batch, height, width of the feature map, tokens of the context.
SIZES = [
    *((batch, 8, 8, 7) for batch in range(1, 21)),
    *((2, height, width, 7) for height, width in ((1, 1), (1, 9), (5, 3), (7, 7), (11, 13), (33, 25), (25, 33))),
    *((2, 8, 8, tokens) for tokens in (1, 2, 3, 77, 154, 231)),
    (1, 1, 1, 1),
    (3, 17, 9, 5),
]


class TestSizes:
    def test_the_first_call_compiles_each_distinct_region_once(self, cold: Rig) -> None:
        bound = cold.bind(seeded(Model))
        with cold.expect(region_compiles=2, region_calls=4, graph_calls=1, verifications=ANY):
            assert bound.error(*inputs()) <= TOLERANCE
        assert bound.program.regions == (2, 2)

    def test_blocks_whose_regions_show_only_in_calls_count_by_their_structure(self, cold: Rig) -> None:
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.ReLU())

        def hooks(run: Any, bypass: Any) -> list[Hook]:
            labels = [(block, (type(block).__name__, name)) for name, block in module.named_children()]
            return [Hook(block, block.forward, label=label, structure=label[0]) for block, label in labels]

        bound = cold.bind(module, hooks)
        assert bound.error(random(2, 4)) == 0
        assert bound.program.regions == (0, 2)

    def test_no_later_size_compiles_and_every_one_is_right(self, rig: Rig, warm: Bound) -> None:
        with rig.expect(region_calls=4 * len(SIZES), graph_calls=len(SIZES), verifications=ANY):
            errors = {size: warm.error(*inputs(*size)) for size in SIZES}
        assert {size: error for size, error in errors.items() if error > TOLERANCE} == {}

    def test_a_size_that_was_seen_is_not_compared_again(self, rig: Rig, warm: Bound) -> None:
        for size in SIZES:
            warm(*inputs(*size))
        with rig.expect(region_calls=4 * len(SIZES), graph_calls=len(SIZES)):
            for size in SIZES:
                warm(*inputs(*size))

    def test_dynamo_compiles_nothing_behind_our_back(self, warm: Bound) -> None:
        counters = torch._dynamo.utils.counters
        before = {name: dict(counters[name]) for name in ("frames", "stats", "recompiles")}
        warm(*inputs(5, 9, 7, 11))
        assert {name: dict(counters[name]) for name in before} == before

    @pytest.mark.parametrize("layout", ["channels last", "a slice", "transposed"])
    def test_the_strides_of_an_input_do_not_matter(self, rig: Rig, warm: Bound, layout: str) -> None:
        x, context = inputs()
        x = {
            "channels last": x.to(memory_format=torch.channels_last),
            "a slice": random(2, 32, 8, 8)[:, ::2],
            "transposed": x.transpose(2, 3),
        }[layout]
        with rig.expect(region_calls=4, graph_calls=1):
            assert warm.error(x, context) <= TOLERANCE


class TestModules:
    def test_two_modules_of_one_structure_share_an_artifact_and_keep_their_weights(self, rig: Rig, warm: Bound) -> None:
        other = rig.bind(seeded(Model, seed=1))
        with rig.expect(region_calls=4, graph_calls=1):
            result = other(*inputs())
        with torch.inference_mode():
            assert relative_error(result, other.module(*inputs())) <= TOLERANCE
        assert relative_error(result, warm(*inputs())) > 0.01

    @pytest.mark.parametrize(
        ("make", "shape"),
        [
            (lambda: Attention(heads=4), ((2, 5, 16), (2, 7, 16))),
            (lambda: Attention(eps=0.5), ((2, 5, 16), (2, 7, 16))),
            (lambda: Convolution(16, stride=2), ((2, 16, 9, 8),)),
            (lambda: Convolution(16).to(torch.bfloat16), ((2, 16, 8, 8),)),
        ],
        ids=["heads", "eps", "stride", "dtype"],
    )
    def test_a_module_with_another_setting_gets_its_own(self, rig: Rig, warm: Bound, make: Any, shape: Any) -> None:
        other = rig.bind(seeded(make))
        dtype = next(other.module.parameters()).dtype
        with rig.expect(region_compiles=1, region_calls=1, graph_calls=1, verifications=ANY):
            error = other.error(*(random(*sizes, dtype=dtype) for sizes in shape))
        assert error <= (TOLERANCE if dtype is torch.float32 else 1e-2)

    def test_weights_in_another_memory_layout_are_right_and_cost_the_others_nothing(self, cold: Rig) -> None:
        usual = cold.bind(seeded(Model))
        usual(*inputs())
        other = cold.bind(seeded(Model).to(memory_format=torch.channels_last))
        assert other.error(*inputs()) <= TOLERANCE
        with cold.expect(region_calls=4, graph_calls=1):
            assert usual.error(*inputs()) <= TOLERANCE

    def test_a_weight_used_twice_is_told_from_two_weights(self, cold: Rig) -> None:
        x, context = random(2, 5, 16), random(2, 7, 16)
        usual, tied = seeded(Attention), seeded(Attention)
        tied.v.weight = tied.k.weight
        for module in (usual, tied, usual):
            assert cold.bind(module).error(x, context) <= TOLERANCE
        assert cold.details == []


class TestTraces:
    """What a trace must leave as it found it."""

    def test_the_module_keeps_no_trace_of_a_call(self, warm: Bound) -> None:
        blocks = [block for block in warm.module.modules() if hasattr(type(block), "dims")]
        warm(*inputs())
        assert len(blocks) == 4
        assert [block for block in blocks if "forward" in block.__dict__] == []

    def test_it_keeps_none_of_a_call_that_failed(self, warm: Bound) -> None:
        with pytest.raises(RuntimeError):
            warm(random(2, 15, 8, 8), inputs()[1])
        assert [block for block in warm.module.modules() if "forward" in block.__dict__] == []
        assert warm.error(*inputs()) <= TOLERANCE

    def test_a_forward_of_another_pack_is_called_and_stays(self, rig: Rig, warm: Bound) -> None:
        bound = rig.bind(seeded(Model))
        foreign = lambda x: x * 0  # noqa: E731
        bound.module.convolutions[0].forward = foreign
        with rig.expect(region_calls=3, graph_calls=1):
            assert bound.error(*inputs()) <= TOLERANCE
        assert bound.module.convolutions[0].__dict__["forward"] is foreign

    def test_torchs_own_settings_are_as_they_were(self, cold: Rig) -> None:
        settings = current_settings()
        with cold.expect(region_compiles=1, region_calls=1, graph_calls=1, verifications=ANY):
            cold.bind(seeded(lambda: Convolution(16)))(random(2, 16, 8, 8))
        assert settings == current_settings()


def current_settings() -> dict[str, Any]:
    from torch._inductor import config as inductor_config
    from torch.fx.experimental import _config as symbolic_config

    levels = {name: logging.getLogger(name).level for name in ("torch", "torch._inductor", "torch.fx.experimental")}
    return {
        "inductor": inductor_config.get_config_copy(),  # type: ignore[attr-defined]
        "symbolic": symbolic_config.backed_size_oblivious,  # type: ignore[attr-defined]
        "grad": torch.is_grad_enabled(),
        "logging": levels,
    }
