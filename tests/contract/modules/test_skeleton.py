"""Copies of blocks: a trace of the copy is a trace of the block, and the copy keeps nothing of the model alive."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from compile_cache.attribute_policy import ModuleAttributePolicy
from compile_cache.backends.inductor.lower.tracing import general_hints, trace
from compile_cache.modules.gguf_loras import LoraInputs
from compile_cache.modules.gguf_types import decoded
from compile_cache.modules.gguf_weights import is_gguf_class
from compile_cache.modules.region_weights import weight_forms, weight_slots
from compile_cache.modules.site import RegionSite
from compile_cache.modules.skeleton import skeleton_of
from compile_cache.modules.structure import structure_digest

from ...unit.modules.test_gguf import block, weight
from ...unit.modules.test_gguf_loras import LoRAAdapter, patch
from ...unit.modules.test_gguf_loras import adapter as lora
from ..backends.inductor.compiler.behind_rig import Behind
from ..dynamic_vram.fake_paging import Checkpoint, uncaptured
from ..reachable import reachable
from ..rig import TOKENS, TOLERANCE, original, random, seeded

FORMATS = ("Q8_0", "Q4_K", "F32")
GGUF = ModuleAttributePolicy(knows_layout=is_gguf_class)


class FileLinear(nn.Module):
    """Decodes its weight in each call, and applies its LoRAs."""

    def __init__(self, format: str) -> None:
        super().__init__()
        if format == "F32":
            made = weight(format, 0.1 * random(32, 32), 32, 32)
        else:
            data, numbers = block(format)
            made = weight(format, data.repeat(32 * 32 // len(numbers), 1), 32, 32)
        self.weight = nn.Parameter(made, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers: Any = self.weight
        if is_gguf_class(type(numbers)):
            kind = numbers.tensor_type.name
            data = torch.Tensor(numbers)
            numbers, patches = data if kind == "F32" else decoded(kind, data, (32, 32)), numbers.patches
            for strength, added, *_ in [each for group, _ in patches for each in group]:
                up, down, alpha, *_ = added.weights
                numbers = numbers + strength * alpha / down.shape[0] * up @ down
        return nn.functional.linear(x, numbers)


class FileBlock(nn.Module):
    dims = (TOKENS,)

    def __init__(self, format: str = "Q8_0") -> None:
        super().__init__()
        self.first, self.second = FileLinear(format), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh()) + x


@pytest.fixture(autouse=True)
def core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "comfy.weight_adapter.lora", SimpleNamespace(LoRAAdapter=LoRAAdapter))


def code(site: RegionSite, module: nn.Module, tensors: Sequence[torch.Tensor]) -> tuple[str, Any, Any]:
    sizes = {"b": 3, "n": 5, "lora0": 16}
    hints = general_hints({name: sizes[name] for dims in site.dims for name in dims if name}, tensors[0].device)
    made = trace(site.function, module, tensors, site.dims, hints)
    return made.graph.code, made.used_weights, made.quantized


@pytest.mark.parametrize("has_lora", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_a_trace_of_the_copy_is_a_trace_of_the_block(format: str, has_lora: bool) -> None:
    module: Any = FileBlock(format)
    x = random(3, 5, 32)
    if has_lora and format != "F32":
        module.first.weight.patches = [([patch(lora(32, 32))], "key")]
    plain = RegionSite("block", "FileBlock", module, original, FileBlock.dims)
    site, tensors, refused = LoraInputs(plain, weight_slots(module)).added_to([x])
    assert refused is None
    assert len(tensors) == (3 if has_lora and format != "F32" else 1)
    copy = skeleton_of(module)
    assert code(site, copy, tensors) == code(site, module, tensors)
    assert structure_digest(copy) == structure_digest(module)
    assert weight_forms(weight_slots(copy)) == weight_forms(weight_slots(module))


@pytest.mark.parametrize("format", FORMATS)
def test_a_copy_holds_no_tensor_of_a_block_with_weights_of_a_file(format: str) -> None:
    module: Any = FileBlock(format)
    module.first.weight.patches = [([patch(lora(32, 32))], "key")]
    copy: Any = skeleton_of(module)
    found = [each for each in reachable(copy) if isinstance(each, torch.Tensor)]
    assert len(found) == 3
    assert all(each.is_meta for each in found)
    assert is_gguf_class(type(copy.first.weight))
    assert not copy.first.weight.patches


@pytest.mark.parametrize("has_lora", [False, True])
def test_behind_the_picture_blocks_with_weights_of_a_file_are_compiled(has_lora: bool) -> None:
    rig = Behind(attribute_policy=GGUF)
    module = seeded(FileBlock)
    if has_lora:
        module.first.weight.patches = [([patch(lora(32, 32))], "key")]
    bound, x = rig.bind(module), random(3, 5, 32)
    rig.call(bound, x)
    kept = reachable(*rig.queue.waiting.values())
    assert not {id(each) for each in module.parameters()} & set(map(id, kept))
    rig.come()
    with rig.expect(graph_calls=1, region_compiles=1, verifications=1, region_calls=1):
        assert rig.call(bound, x) <= TOLERANCE
    assert rig.queue.left == 0


def test_a_copy_holds_no_page(comfy: None, adapter: Callable[[str], ModuleType]) -> None:
    checkpoint = Checkpoint()
    checkpoint.load("a")
    paged: Any = checkpoint.model.blocks[0]
    uncaptured(paged)
    paged._prefetch, paged._pins, paged.seed_key = {"signature": (1, 2)}, {"weights": paged._v_weight}, "blocks.0"
    paged.weight_function = []
    policy = adapter("comfyui.module_attributes").ATTRIBUTES
    copy: Any = skeleton_of(paged, policy)
    kept = reachable(copy)
    assert all(each.is_meta for each in kept if isinstance(each, torch.Tensor))
    assert not {id(checkpoint), id(checkpoint.reservation)} & set(map(id, kept))
    assert [name for name in vars(copy) if name.startswith("_v")] == []
    assert copy.weight_function == []
    assert copy.weight_function is not paged.weight_function
    assert type(copy).comfy_cast_weights
    assert paged._v[0] is checkpoint.reservation
