"""LoRAs on paged weights: our fill gives what ComfyUI's own call of a module gives, by its own functions."""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

CPU = torch.device("cpu")
BYTES = 1 << 16


class Pages:
    """A `ModelVBAR` whose pages are all there; its allocations lie in a tensor."""

    device = 0

    def __init__(self) -> None:
        self.memory = torch.zeros(BYTES, dtype=torch.uint8)
        self.base_addr = self.memory.data_ptr()
        self._next = 0

    def alloc(self, size: int) -> tuple[Pages, int, int]:
        start = self._next
        self._next += -(-size // 512) * 512
        return self, self.base_addr + start, size

    def fault(self, address: int, size: int) -> array[int]:
        return array("I", [1, 0])

    def unpin(self, address: int, size: int) -> None: ...

    def prioritize(self) -> None: ...

    def get_residency(self) -> list[int]:
        return [1]

    def loaded_size(self) -> int:
        return BYTES


@pytest.fixture
def ops(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`comfy.ops` with memory on the CPU in place of a GPU's."""

    def tensor(allocation: tuple[Pages, int, int], device: torch.device) -> torch.Tensor:
        pages, address, size = allocation
        return pages.memory[address - pages.base_addr :][:size]

    ops = importlib.import_module("comfy.ops")
    aimdo = importlib.import_module("comfy_aimdo.torch")
    monkeypatch.setattr(aimdo, "aimdo_to_tensor", tensor)
    monkeypatch.setattr(importlib.import_module("comfy.pinned_memory"), "pin_memory", lambda *_, **__: None)
    return ops


def model(ops: Any, pages: Pages) -> torch.nn.ModuleDict:
    """A model in bfloat16 as Wan's: its patch embedding is declared in float32, and gets its input so."""
    made = torch.nn.ModuleDict(
        {
            "patch_embedding": ops.disable_weight_init.Conv3d(2, 8, (1, 2, 2), device="cpu", dtype=torch.float32),
            "first": ops.disable_weight_init.Linear(8, 8, device="cpu", dtype=torch.bfloat16),
            "second": ops.disable_weight_init.Linear(8, 8, device="cpu", dtype=torch.bfloat16),
        }
    ).requires_grad_(False)
    memory = importlib.import_module("comfy.memory_management")
    patch = importlib.import_module("comfy.model_patcher").LowVramPatch
    generator = torch.Generator().manual_seed(0)
    for name, module in made.items():
        for each in (module.weight, module.bias):
            each.copy_(torch.randn(each.shape, generator=generator))
        key = f"{name}.weight"
        change = 0.1 * torch.randn(module.weight.shape, generator=generator)
        module.weight_lowvram_function = patch(key, {key: [(1.0, ("diff", (change,)), 1.0, None, None)]})
        module.bias_lowvram_function = None
        module.seed_key, module._v_signature = name, None
        module._v = pages.alloc(memory.vram_aligned_size([module.weight, module.bias]))
    return made


def load(ops: Any) -> Callable[[Any, torch.dtype], None]:
    """What `cast_bias_weight` does with a paged module and an input of this dtype; its own way leaves out the CPU."""

    def run(module: Any, dtype: torch.dtype) -> None:
        ops.cast_modules_with_vbar([module], dtype, CPU, dtype, False)
        ops.resolve_cast_module_with_vbar(module, dtype, CPU, dtype, None, False)
        del module._prefetch

    return run


def test_a_fill_gives_the_weights_of_stock(core: SimpleNamespace, ops: Any) -> None:
    stock, ours = model(ops, Pages()), model(ops, Pages())
    for name, module in stock.items():
        load(ops)(module, torch.float32 if name == "patch_embedding" else torch.bfloat16)
    weights = core.ours("dynamic_vram.paged_weights").PagedWeights(load(ops))
    weights.dtype = torch.bfloat16
    weights.survey(ours.modules())
    assert weights.pin()
    for name in stock:
        assert stock[name]._v_weight.dtype == ours[name]._v_weight.dtype
        assert torch.equal(stock[name]._v_weight, ours[name]._v_weight), name
        assert not torch.equal(stock[name]._v_weight, stock[name].weight), "the LoRA was not applied"


def test_a_model_in_float32_computes_in_the_dtype_of_the_latent(core: SimpleNamespace, ops: Any) -> None:
    made = model(ops, Pages()).float()
    for module in made.values():
        for each in (module.weight, module.bias):
            each._model_dtype = torch.float32
    filled: list[torch.dtype] = []

    def fill(module: Any, dtype: torch.dtype) -> None:
        filled.append(dtype)
        module._v_signature = [1, 0]

    weights = core.ours("dynamic_vram.paged_weights").PagedWeights(fill)
    weights.dtype = torch.bfloat16
    weights.survey(made.modules())
    weights.pin()
    assert filled == [torch.bfloat16] * 3


def test_a_load_that_maps_no_page_applies_the_lora_too(
    core: SimpleNamespace, ops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, pages = model(ops, Pages()), Pages()
    ours = model(ops, pages)
    monkeypatch.setattr(pages, "get_residency", lambda: [0])
    before, places = pages.memory.clone(), [module._v for module in ours.values()]
    linear = [ours["first"], ours["second"]]
    loading = core.ours("dynamic_vram.page_loading")
    with loading.loaded(linear, CPU, torch.bfloat16, False, lambda size: None, loading.Resident()) as found:
        given = {(module, name): tensor.clone() for module, name, tensor in found}
    for name in ("first", "second"):
        load(ops)(stock[name], torch.bfloat16)
        assert torch.equal(given[ours[name], "weight"], stock[name]._v_weight), name
        assert torch.equal(given[ours[name], "bias"], stock[name]._v_bias), name
    assert torch.equal(pages.memory, before)
    assert [module._v for module in ours.values()] == places
    assert not any("_prefetch" in vars(module) for module in ours.values())


def test_core_is_asked_for_a_module_until_its_pages_hold_the_lora(
    core: SimpleNamespace, ops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, ours = model(ops, Pages()), model(ops, Pages())
    loading = core.ours("dynamic_vram.page_loading")
    resident, linear, crossed = loading.Resident(), [ours["first"], ours["second"]], []
    asked: list[int] = []
    cast = ops.cast_modules_with_vbar
    monkeypatch.setattr(ops, "cast_modules_with_vbar", lambda own, *more: asked.append(len(own)) or cast(own, *more))

    def run() -> dict[Any, torch.Tensor]:
        given = (linear, CPU, torch.bfloat16, True, crossed.append, resident)
        with loading.loaded(*given) as found:
            return {(module, name): tensor.clone() for module, name, tensor in found}

    for _ in range(4):
        last = run()
    assert asked == [2]
    for name in ("first", "second"):
        load(ops)(stock[name], torch.bfloat16)
        assert torch.equal(last[ours[name], "weight"], stock[name]._v_weight), name
        assert torch.equal(last[ours[name], "bias"], stock[name]._v_bias), name
    ours["first"]._v_signature = None  # by a load with another LoRA
    asked.clear()
    run()
    assert asked == [1]
    assert len(crossed) == 3
