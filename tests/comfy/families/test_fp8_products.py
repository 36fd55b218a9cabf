"""Weights in fp8 on a device with such products: scaled weights, and plain ones with the loader's fp8_e4m3fn_fast."""

from __future__ import annotations

import dataclasses
import importlib
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from . import kit
from .fp8_products import fp8_products
from .kit import Bench, forget_regions, norm, run_traces
from .models import FIRST, MODELS, SIZES, Model
from .quantized import FAMILIES, in_full_precision, model_of
from .test_quantized import Weights

__all__ = ["fp8_products"]
pytestmark = pytest.mark.usefixtures("fp8_products")
SCALED, FAST = "float8_e4m3fn", "fast"
CASES = [*[(family, SCALED) for family in FAMILIES], *[(family, FAST) for family in (*FAMILIES, "Z-Image")]]


@dataclasses.dataclass(frozen=True)
class FastModel(Model):
    """Plain weights in fp8, as UNETLoader loads them with fp8_e4m3fn_fast."""

    patchers: list[Any] = dataclasses.field(default_factory=list)

    def make(self) -> Any:
        made = self._by_hand()
        if self.granted:
            return self._in_fp8(made)
        weights = {name: value.clone() for name, value in made.state_dict().items()}
        load = importlib.import_module("comfy.sd").load_diffusion_model_state_dict
        about = {"config": json.dumps({"transformer": self.settings})}
        options = {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True}
        loaded = load(weights, options, about if self.described else None).model.diffusion_model
        return loaded.eval().requires_grad_(False)

    def _in_fp8(self, network: torch.nn.Module) -> torch.nn.Module:
        """The network as the loader makes it; of its own it makes no small one."""
        linear = importlib.import_module("comfy.ops").fp8_ops.Linear
        for module in network.modules():
            if isinstance(module, linear):
                module.weight = torch.nn.Parameter(module.weight.to(torch.float8_e4m3fn), requires_grad=False)
        return network


def bench_of(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, family: str, kind: str) -> Bench:
    monkeypatch.setenv("RESOLUTE_WORKERS", "0")
    forget_regions(core)
    return Bench(
        core,
        model_of(family, SCALED) if kind == SCALED else FastModel(**{**vars(MODELS[family]), "operations": "fp8_ops"}),
    )


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_blocks_with_fp8_products_compile_in_the_first_call_only(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, family: str, kind: str
) -> None:
    """Blocks of Wan, LTX and Z-Image give an input of theirs to such a product, which clamps it in place."""
    run_traces(core, monkeypatch)
    monkeypatch.setattr(kit, "TOLERANCE", 1e-6)
    bench = bench_of(core, monkeypatch, family, kind)
    assert bench.check(FIRST) == bench.counts(bench.model.compiles)
    bench.check_all(SIZES)
    assert bench.formats() == [["float8_e4m3fn products"]]


def test_a_lora_of_scaled_weights_changes_the_numbers_alone(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_traces(core, monkeypatch)
    bench = bench_of(core, monkeypatch, "LTX", SCALED)
    weights = Weights(bench)
    given = bench.model.call(FIRST)
    weights.without()
    bench.check(FIRST)
    results = [bench.call(given)]
    for change in (lambda: weights.with_lora(1), lambda: weights.with_lora(2, 0.5), weights.without):
        change()
        results.append(bench.call(given))
        assert bench.check(SIZES[0]) == bench.counts()
    assert torch.equal(results[0], results[-1])
    assert not torch.equal(results[1], results[2])


def test_a_quantizer_that_is_fused_is_as_near_to_full_precision_as_core(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_of(core, monkeypatch, "LTX", SCALED)
    monkeypatch.setattr(kit, "TOLERANCE", 0.2)
    reference = in_full_precision(bench)
    assert bench.check(FIRST) == bench.counts(bench.model.compiles)
    ours, cores = bench.errors(reference, (FIRST, *SIZES))
    assert norm(cores) > 1e-3, "the products are in fp8"
    assert norm(ours) <= 1.1 * norm(cores), (ours, cores)
    forget_regions(core)
