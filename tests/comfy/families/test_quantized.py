"""Transformers with quantized weights: as eager, compiled once, with a LoRA and without."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from types import SimpleNamespace

import pytest
import torch

from . import kit, quantized
from .kit import Bench, call, forget_regions, norm, run_traces
from .models import FIRST, SIZES
from .quantized import FAMILIES, FORMATS, PRODUCTS, QuantizedModel, in_full_precision, model_of

CASES = [(family, name) for family in FAMILIES for name in FORMATS]


class Weights:
    """The weights of a bench's model, to which core applies LoRAs."""

    def __init__(self, bench: Bench) -> None:
        assert isinstance(bench.model, QuantizedModel)
        self._patcher = bench.model.patchers[-1]
        self._load = importlib.import_module("comfy.model_management").load_models_gpu

    def with_lora(self, seed: int, strength: float = 1.0) -> None:
        """Load the model with a LoRA of every matrix, as core does before sampling."""
        clone = self._patcher.clone()
        generator = torch.Generator().manual_seed(seed)
        names = [name for name, weight in clone.model.state_dict().items() if weight.ndim == 2 and "blocks." in name]
        patches = {
            name: ("diff", (0.05 * torch.randn(_shape(clone.model, name), generator=generator),))
            for name in names
            if name.endswith(".weight")
        }
        clone.add_patches(patches, strength)
        self._load([clone])

    def without(self) -> None:
        self._load([self._patcher.clone()])


def _shape(model: torch.nn.Module, name: str) -> torch.Size:
    module, _, own = name.rpartition(".")
    weight: torch.Tensor = getattr(model.get_submodule(module), own)
    return weight.shape


def bench_of(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, family: str, name: str) -> Bench:
    monkeypatch.setenv("RESOLUTE_WORKERS", "0")
    monkeypatch.setattr(kit, "TOLERANCE", 1e-12 if name in PRODUCTS else 1e-4)
    forget_regions(core)
    return Bench(core, model_of(family, name))


@pytest.mark.grid(12)
@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_quantized_model_compiles_in_its_first_call_only(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, family: str, name: str
) -> None:
    run_traces(core, monkeypatch)
    bench = bench_of(core, monkeypatch, family, name)
    weights = Weights(bench)
    weights.without()
    assert bench.check(FIRST) == bench.counts(bench.model.compiles)
    bench.check_all(SIZES)
    given = bench.model.call(FIRST)
    results = [bench.call(given)]
    for change in (lambda: weights.with_lora(1), lambda: weights.with_lora(2, 0.5), weights.without):
        change()
        results.append(bench.call(given))
        bench.check_all([FIRST, SIZES[1]])
    assert torch.equal(results[0], results[-1])
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(results[:-1], 2))


@pytest.mark.parametrize("name", FORMATS)
def test_the_report_names_what_computes_the_weights(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run_traces(core, monkeypatch)
    bench = bench_of(core, monkeypatch, "LTX", name)
    bench.check(FIRST)
    format = name.partition(",")[0]
    emulated = f"emulated {format}: this device has no such products"
    assert bench.formats() == [[f"{format} products" if name in PRODUCTS else emulated]]


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", FORMATS)
def test_lowered_code_is_as_near_to_full_precision_as_core(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Rounding in front of a quantizer is amplified: two right results differ, and both are near fp32."""
    bench = bench_of(core, monkeypatch, "LTX", name)
    monkeypatch.setattr(kit, "TOLERANCE", 0.2)
    reference = in_full_precision(bench)
    assert bench.check(FIRST) == bench.counts(bench.model.compiles)
    bench.check_all(SIZES)
    ours, cores = bench.errors(reference, (FIRST, *SIZES))
    assert norm(ours) <= 1.5 * norm(cores) + 1e-6, (ours, cores)
    forget_regions(core)


def test_the_model_in_full_precision_has_all_weights_where_modules_begin_without(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With DynamicVRAM core makes its Linear modules without weights."""
    bench = bench_of(core, monkeypatch, "Flux", "int8_tensorwise")
    given = bench.model.call(FIRST)
    expected = call(in_full_precision(bench), given)
    monkeypatch.setattr(importlib.import_module("comfy.memory_management"), "aimdo_enabled", True)
    assert torch.equal(call(in_full_precision(bench), given), expected)


@pytest.mark.parametrize("wrong", ["scale", "numbers"])
def test_a_corrupt_weight_gets_cores_own_error(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    run_traces(core, monkeypatch)
    bench = bench_of(core, monkeypatch, "LTX", "int8_tensorwise")
    for part in bench.module.modules():
        weight = getattr(part, "weight", None)
        if hasattr(weight, "_params"):
            params, numbers = weight._params, weight._qdata
            if wrong == "scale":
                params = dataclasses.replace(params, scale=torch.ones(3))
            else:
                numbers = numbers[:, :3].contiguous()
            part.weight = torch.nn.Parameter(type(weight)(numbers, weight._layout_cls, params), False)
    given = bench.model.call(FIRST)
    with pytest.raises((RuntimeError, ValueError)) as cores:
        bench.call(given)
    with bench.compiled(), pytest.raises((RuntimeError, ValueError)) as ours:
        bench.call(given)
    assert (ours.type, str(ours.value)) == (cores.type, str(cores.value))


@pytest.mark.parametrize("about", [b"no JSON", b'{"format": "unheard of"}', b"{}"])
def test_corrupt_metadata_gets_the_loaders_own_error(core: SimpleNamespace, about: bytes) -> None:
    model = model_of("LTX", "int8_tensorwise")
    with pytest.MonkeyPatch.context() as patched, pytest.raises((ValueError, KeyError)):
        patched.setattr(quantized, "metadata", lambda name: torch.tensor(list(about), dtype=torch.uint8))
        model.patcher()
