"""Tracing: names of dimensions become symbols, weights become inputs, guards become a list."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from compile_cache.backends.inductor.lower import tracing
from compile_cache.backends.inductor.lower.tracing import FEATURE_MAP, bind_dims, general_hints, trace, weight_slots

from ....rig import CONTEXT, TOKENS, Attention, Model, original, random, seeded


@pytest.mark.parametrize(
    ("dims", "shapes", "sizes"),
    [
        ((TOKENS,), ((2, 5, 16),), {"b": 2, "n": 5}),
        ((TOKENS, CONTEXT), ((2, 5, 16), (2, 7, 16)), {"b": 2, "n": 5, "m": 7}),
        ((TOKENS, CONTEXT), ((2, 5, 16), (1, 7, 16)), None),
        ((TOKENS,), ((2, 5),), None),
        ((TOKENS,), ((2, 5, 16, 1),), None),
        (((None, None),), ((2, 5),), {}),
        ((("n", "n"),), ((5, 5),), {"n": 5}),
        ((("n", "n"),), ((5, 6),), None),
    ],
)
def test_a_name_has_one_size_or_the_inputs_do_not_fit(dims: object, shapes: object, sizes: object) -> None:
    assert bind_dims(dims, shapes) == sizes  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "hints"),
    [
        ({"b0": 1, "b1": 1, "b2": 2, "b3": 77, "0.1": 1}, {"b0": 2, "b1": 2, "b2": 4, "b3": 77, "0.1": 2}),
        ({"b0": 2, "b1": 2, "b2": 4}, {"b0": 2, "b1": 2, "b2": 4}),
        ({"b": 1, "n": 1}, {"b": 17, "n": 2}),
    ],
)
def test_a_batch_of_one_is_traced_as_a_larger_one(sizes: dict[str, int], hints: dict[str, int]) -> None:
    assert general_hints(sizes, torch.device("cpu")) == hints


def test_weights_are_found_in_the_order_of_a_trace_parameters_first() -> None:
    module = seeded(Model)
    module.register_buffer("table", torch.zeros(3))
    expected = [*module.named_parameters(), *module.named_buffers()]
    found = [slots[name] for slots, name in weight_slots(module)]
    assert len(found) == len(expected)
    assert all(a is b for a, (_, b) in zip(found, expected, strict=True))


def test_equal_sizes_under_two_names_stay_two_symbols_and_nothing_is_guarded() -> None:
    inputs = [random(2, 5, 16), random(2, 5, 16)]
    traced = trace(original, seeded(Attention), inputs, (TOKENS, CONTEXT), {"b": 2, "n": 5, "m": 5})
    assert len(set(traced.symbols.values())) == 3
    # Some torch versions note `max(1, n) == n`; what must not be there is an equality of two dimensions.
    assert not [guard for guard in traced.guards if isinstance(guard, sympy.Eq) and len(guard.free_symbols) > 1]


def test_only_the_weights_that_are_used_enter_the_graph() -> None:
    def values(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module.v(x)

    module = seeded(Attention)
    traced = trace(values, module, [random(2, 5, 16)], (TOKENS,), {"b": 2, "n": 5})
    slots = weight_slots(module)
    used = [slots[index][0][slots[index][1]] for index in traced.used_weights]
    assert [id(weight) for weight in used] == [id(module.v.weight), id(module.v.bias)]


@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_a_site_that_says_that_it_computes_no_attention_is_held_to_that(kernel: SDPBackend) -> None:
    """Its key has no switches of attention. The mathematical form has no operator of that name."""
    inputs, hints = [random(2, 5, 16), random(2, 7, 16)], {"b": 2, "n": 5, "m": 7}
    with sdpa_kernel([kernel]):
        trace(original, seeded(Attention), inputs, (TOKENS, CONTEXT), hints)
        with pytest.raises(ValueError, match="it computes attention"):
            trace(original, seeded(Attention), inputs, (TOKENS, CONTEXT), hints, attends=False)


def test_contiguous_memory_has_strides_that_are_products_of_sizes() -> None:
    """With a maximum in them, inductor's kernels divide by a size for every number, to find it in memory."""
    dims = [("b", "n", None)]
    traced = trace(lambda module, x: x + 1, torch.nn.Module(), [random(2, 9, 8)], dims, {"b": 17, "n": 9})
    n = traced.symbols["n"]
    (result,) = next(node for node in traced.graph.graph.nodes if node.op == "output").args[0]
    for tensor in (traced.fakes[0], result.meta["val"]):
        strides = [each.node.expr if isinstance(each, torch.SymInt) else each for each in tensor.stride()]
        assert strides == [8 * n, 8, 1]
    assert traced.guards == []


@pytest.mark.parametrize(("dims", "is_map"), [(("b", None, "h", "w"), True), (("b", "n", None, None), False)])
def test_a_feature_map_leaves_a_region_as_the_next_takes_it(
    monkeypatch: pytest.MonkeyPatch, dims: tuple[str | None, ...], is_map: bool
) -> None:
    """As on CUDA, where core's SpatialTransformer would give back another layout than convolutions take."""
    on_cuda = lambda x, names=FEATURE_MAP: torch.channels_last if names[-2:] == ("h", "w") else torch.contiguous_format  # noqa: E731
    monkeypatch.setattr(tracing, "region_format", on_cuda)
    hints = {name: size for name, size in zip(dims, (17, 4, 6, 5), strict=True) if name is not None}
    traced = trace(lambda module, x: (x * 2).contiguous(), torch.nn.Module(), [random(17, 4, 6, 5)], [dims], hints)
    (result,) = next(node for node in traced.graph.graph.nodes if node.op == "output").args[0]
    assert (result.meta["val"].stride()[1] == 1) is is_map
    assert torch.equal(traced.graph(random(17, 4, 6, 5))[0], random(17, 4, 6, 5) * 2)
