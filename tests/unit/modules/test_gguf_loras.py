"""LoRAs on GGUF weights: one pair for all, kept while they are the same; what is no plain LoRA has a reason."""

from __future__ import annotations

import gc
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compile_cache.modules import gguf_loras
from compile_cache.modules.gguf_loras import LoraInputs, forget, free_after_oom, pair_of
from compile_cache.modules.region_weights import weight_inputs, weight_slots, weights_from_inputs
from compile_cache.modules.site import RegionSite

from .test_gguf import block, layer, weight


class LoRAAdapter:
    """As core's."""

    name = "lora"

    def __init__(self, weights: Any) -> None:
        self.weights = weights


@pytest.fixture(autouse=True)
def core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "comfy.weight_adapter.lora", SimpleNamespace(LoRAAdapter=LoRAAdapter))


def adapter(rows: int, columns: int, rank: int = 4, alpha: float | None = 2.0) -> Any:
    return LoRAAdapter((torch.randn(rows, rank), torch.randn(rank, columns), alpha, None, None, None))


def patch(value: Any, strength: float = 1.0, of_weight: float = 1.0, place: Any = None, function: Any = None) -> Any:
    return (strength, value, of_weight, place, function)


def patched(*patches: Any, shape: tuple[int, ...] = (6, 32)) -> Any:
    data, _ = block("Q8_0")
    made = weight("Q8_0", data.repeat(6 * torch.Size(shape[1:]).numel() // 32, 1), *shape)
    made.patches = [(list(patches), "key")]
    return made


def product(found: Any) -> torch.Tensor:
    up, down = found
    assert up.dtype is down.dtype is torch.float32
    return up @ down


def test_all_loras_of_a_weight_are_one_pair() -> None:
    first, second, rows, columns = adapter(6, 32), adapter(6, 32, 3, None), adapter(2, 32), adapter(6, 16)
    held = patched(
        patch(first, 0.5), patch(second, -1.0), patch(rows, place=(0, 4, 2)), patch(columns, place=(1, 16, 16))
    )
    found = pair_of(held)
    expected = 0.5 * 2.0 / 4 * first.weights[0] @ first.weights[1] - second.weights[0] @ second.weights[1]
    expected[4:] += 0.5 * rows.weights[0] @ rows.weights[1]
    expected[:, 16:] += 0.5 * columns.weights[0] @ columns.weights[1]
    torch.testing.assert_close(product(found), expected)
    assert found[0].shape[1] % 16 == 0  # type: ignore[index, union-attr]


def test_weights_of_convolutions_are_matrices() -> None:
    lora = adapter(6, 8 * 4)
    lora.weights = (lora.weights[0][:, :, None, None], lora.weights[1].reshape(4, 8, 2, 2), *lora.weights[2:])
    held = patched(patch(lora), shape=(6, 8, 2, 2))
    expected = 0.5 * lora.weights[0].flatten(1) @ lora.weights[1].flatten(1)
    torch.testing.assert_close(product(pair_of(held)), expected)


def test_a_pair_stays_where_it_is_until_a_lora_changes() -> None:
    lora, other = adapter(6, 32), adapter(6, 32)
    held = patched(patch(lora))
    first = pair_of(held)
    held.patches = [([patch(lora)], "key")]  # core loads the model again
    assert pair_of(held) is first
    for now in (patch(lora, 0.5), patch(other, 0.5)):
        before = pair_of(held)
        held.patches = [([now], "key")]
        assert pair_of(held) is not before
    kept = weakref.ref(pair_of(held)[0])  # type: ignore[index, arg-type]
    held.patches = []
    assert pair_of(held) is None
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (patch(("diff", (torch.zeros(6, 32),))), "a difference is no plain LoRA"),
        (patch(SimpleNamespace(name="loha", weights=(0,) * 7)), "loha is no plain LoRA"),
        (patch(SimpleNamespace(name="lora", weights=adapter(6, 32).weights)), "lora is no plain LoRA"),
        (patch(adapter(6, 32), of_weight=0.5), "scales the weight itself"),
        (patch(adapter(6, 32), function=abs), "scales the weight itself"),
        (patch(adapter(6, 31)), "another shape"),
        (patch(adapter(6, 32), place=(0, 4, 2)), "another shape"),
        (patch(adapter(6, 32), place=(2, 4, 2)), "a part of the weight"),
        (patch(LoRAAdapter((*adapter(6, 32).weights[:4], 1, None))), "DoRA"),
        (patch(LoRAAdapter((None, torch.zeros(4, 32), 2.0, None, None, None))), "cannot be read"),
    ],
)
def test_what_is_no_plain_lora_has_a_reason(wrong: Any, reason: str) -> None:
    held = patched(patch(adapter(6, 32)), wrong)
    assert reason in pair_of(held)  # type: ignore[operator]
    held.patches = []
    assert pair_of(held) is None


def test_without_memory_beside_the_model_there_is_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_loras, "has_room", lambda device, size: size < 4 * 16 * (6 + 32))
    assert "no memory" in pair_of(patched(patch(adapter(6, 32))))  # type: ignore[operator]

    def out_of_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gguf_loras, "has_room", lambda device, size: True)
    monkeypatch.setattr(gguf_loras, "_zeros", out_of_memory)
    assert "no memory" in pair_of(patched(patch(adapter(6, 32))))  # type: ignore[operator]


def test_a_pair_goes_when_its_weight_is_unloaded() -> None:
    """ComfyUI leaves the weight in place, on the host and without its patches."""
    held, other = patched(patch(adapter(6, 32))), patched(patch(adapter(6, 32)))
    kept, stays = weakref.ref(pair_of(held)[0]), pair_of(other)  # type: ignore[index, arg-type]
    forget([held, torch.zeros(2)])
    gc.collect()
    assert kept() is None
    assert pair_of(other) is stays


def test_pairs_that_leave_too_little_memory_are_given_up_until_the_loras_change() -> None:
    lora = adapter(6, 32)
    held, without, other = patched(patch(lora)), patched(), patched(patch(lora))
    kept, stays = weakref.ref(pair_of(held)[0]), pair_of(other)  # type: ignore[index, arg-type]
    assert free_after_oom([held, without])
    assert not free_after_oom([held, without])
    gc.collect()
    assert kept() is None
    assert "no memory" in pair_of(held)  # type: ignore[operator]
    assert pair_of(other) is stays
    held.patches = [([patch(lora, 0.5)], "key")]
    assert isinstance(pair_of(held), tuple)


def test_a_weight_that_is_not_on_the_device_has_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = layer("Q8_0")
    one.weight.patches = [([patch(adapter(3, 32))], "key")]
    inputs = LoraInputs(RegionSite("0", "Block", one, lambda *given: given, ((None, None),)), weight_slots(one))
    x = torch.randn(2, 32)
    kept = weakref.ref(inputs.added_to([x])[1][1])
    site, tensors, refused = inputs.added_to([x.to("meta")])
    assert (site.dims, len(tensors), refused) == (((None, None),), 1, None)
    gc.collect()
    assert kept() is None, "it was unloaded meanwhile"
    monkeypatch.setattr(gguf_loras, "_made", None)
    inputs.added_to([x.to("meta")])


def test_a_trace_adds_the_loras_and_a_layer_does_it_itself() -> None:
    """In one block a weight with a LoRA, one without, and one that is tied."""
    (one, numbers), (two, _) = layer("Q8_0"), layer("Q8_0")
    module = torch.nn.ModuleList([one, two, one])

    def run(module: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.nn.functional.linear(x, torch.Tensor(each.weight)) for each in module])

    slots = weight_slots(module)
    inputs = LoraInputs(RegionSite("0", "Block", module, run, (("b", None),), times=(0,)), slots)
    x = torch.randn(2, 32)
    site, tensors, refused = inputs.added_to([x])
    assert (site.dims, len(tensors), refused) == ((("b", None),), 1, None)
    lora = adapter(3, 32)
    one.weight.patches = [([patch(lora)], "key")]
    site, tensors, refused = inputs.added_to([x])
    assert refused is None
    assert site.dims == (("b", None), (None, "lora0"), ("lora0", None), (None, "lora1"), ("lora1", None))
    assert site.times == (0,)
    with weights_from_inputs(module, (), weight_inputs(slots)):
        found = site.function(module, *tensors)
    changed = torch.nn.functional.linear(x, numbers + 0.5 * lora.weights[0] @ lora.weights[1])
    torch.testing.assert_close(found, torch.stack([changed, torch.nn.functional.linear(x, numbers), changed]))

    seen: list[Any] = []
    as_it_is = LoraInputs(RegionSite("0", "Block", module, lambda *given: seen.append(given), ()), slots)
    site, tensors, _ = as_it_is.added_to([x])
    site.function(module, *tensors)
    assert seen[0][0] is module
    assert len(seen[0]) == 2
    assert as_it_is.added_to([x])[1][3] is tensors[3], "zeros are made once"

    two.weight.patches = [([patch(("diff", (numbers,)))], "key")]
    site, tensors, refused = inputs.added_to([x])
    assert "no plain LoRA" in refused.detail  # type: ignore[union-attr]
    assert len(tensors) == 1
