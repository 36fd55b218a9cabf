"""The comparison with the original: wrong code is refused, right code accepted, whatever the mask and the dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.backends.inductor.regions import numerics_check
from compile_cache.errors import NotComparedError
from compile_cache.modules.region_weights import weight_inputs, weight_slots
from compile_cache.modules.site import RegionSite

from ....rig import TOKENS, TOLERANCE, Block, Rig, original, random, seeded, tokens

COUNT, HEADS, WIDTH = 48, 8, 64
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MASKS = ["none", "0 and -inf", "0 and the least number", "bool"]
Code = Callable[..., Any]


class Masked(nn.Module):
    """A transformer block over 48 tokens of 64 numbers. code: where it goes wrong, or how it rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(5))
        for layer in (self.v, self.out, self.down):
            nn.init.normal_(layer.bias, std=0.3)
        for layer in (self.q, self.k):
            nn.init.normal_(layer.weight, std=0.25)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, code: str = "") -> torch.Tensor:
        attended = self.attended(self.one(x), None if code == "no mask" else mask, code)
        weight, bias = self.out.weight.T, self.out.bias * (code != "no bias")
        out = attended @ weight + bias
        if code == "reordered sums":
            half = WIDTH // 2
            out = attended[..., :half] @ weight[:half] + (attended[..., half:] @ weight[half:] + bias)
        y = x + out
        y = y + self.down(F.gelu(self.two(y)))
        if code == "one row":
            y[0, 5] = x[0, 5]
        if code == "one column":
            y[..., 5] = x[..., 5]
        return y

    def attended(self, x: torch.Tensor, mask: torch.Tensor | None, code: str) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if code == "written out":
            scores = q.float() @ k.float().transpose(-1, -2) / q.shape[-1] ** 0.5
            if mask is not None:
                scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask.float()
            result = (scores.softmax(-1) @ v.float()).to(v.dtype)
        else:
            result = F.scaled_dot_product_attention(q, k, v, mask)
        if code == "one head":
            result[:, 3] = 0
        if code == "another axis":
            result = result.flip(1)
        return result.transpose(1, 2).flatten(2)


def fused(module: Masked, x: torch.Tensor, *mask: torch.Tensor) -> torch.Tensor:
    """All in float32, rounded once at the end."""
    masks = [each.float() if each.is_floating_point() else each for each in mask]
    result: torch.Tensor = copy.deepcopy(module).float()(x.float(), *masks).to(x.dtype)
    return result


def coded(code: str) -> Code:
    return lambda module, x, mask=None: module(x, mask, code)


def scaled(factor: float) -> Code:
    """A block whose addition is off by a factor."""
    return lambda module, x, mask=None: (x + factor * (module(x, mask).double() - x)).to(x.dtype)


RIGHT = {"fused": fused, **{code: coded(code) for code in ("", "reordered sums", "written out")}}
WRONG = {
    **{code: coded(code) for code in ("no mask", "no bias", "one row", "one column", "one head", "another axis")},
    "identity": lambda module, x, mask=None: x.clone(),
    "zeros": lambda module, x, mask=None: torch.zeros_like(x),
    "100 times": lambda module, x, mask=None: module(x, mask) * 100,
    "1.02 times what it adds": scaled(1.02),
    "one value more": lambda module, x, mask=None: module(x, mask).index_put(
        (torch.tensor([1]), torch.tensor([7]), torch.tensor([9])), torch.tensor(torch.inf, dtype=x.dtype)
    ),
}


def mask_of(kind: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Half of the tokens of the second picture are padding."""
    allowed = torch.ones(2, 1, 1, COUNT, dtype=torch.bool)
    allowed[-1, ..., COUNT // 2 :] = False
    least = -torch.inf if kind == "0 and -inf" else torch.finfo(dtype).min
    filled = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, least)
    return {"none": [], "bool": [allowed]}.get(kind, [filled])


def difference(module: nn.Module, tensors: list[torch.Tensor], code: Code, *quantized: tuple[str, str]) -> str | None:
    """The verdict of the comparison on code that computes `code(module, *tensors)`."""

    class Compiled:
        def __call__(self, weights: Any, tensors: Any) -> Any:
            return code(module, *tensors)

    compiled: Any = Compiled()
    compiled.quantized = quantized
    site = RegionSite("block", "Block", module, original, ())
    return numerics_check.difference_from_original(compiled, site, weight_inputs(weight_slots(module)), tensors)


# What a block adds, as a part of its input: 0.65, and 0.065 as in the middle of a transformer.
@pytest.mark.parametrize("size", [1, 10])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wrong_code_is_refused_and_right_code_accepted(dtype: torch.dtype, mask: str, size: int) -> None:
    module = seeded(Masked).to(dtype)
    tensors = [(size * random(2, COUNT, WIDTH)).to(dtype), *mask_of(mask, dtype)]
    found = {name: difference(module, tensors, code) for name, code in {**RIGHT, **WRONG}.items()}
    passed = {name for name, why in found.items() if why is None}
    equal = {"no mask"} if mask == "none" else set()
    if dtype is torch.bfloat16 and size == 10:
        equal |= {"1.02 times what it adds"}  # 0.0013 of the result, whose numbers are 0.004 to 0.008 apart
    assert passed == {*RIGHT, *equal}


def test_a_difference_that_is_surely_rounding_costs_one_run_of_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics_check, "_precise", lambda *given: pytest.fail("it ran once more"))
    for dtype in DTYPES:
        for code in RIGHT.values():
            assert difference(seeded(Masked).to(dtype), [random(2, COUNT, WIDTH, dtype=dtype)], code) is None


@pytest.mark.parametrize("shape", [(), (5,), (0, 3), (2, 3, 1), (3, 900, 1000), (1, 4, 3, 1, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, torch.complex64], ids=str)
def test_results_of_every_shape_are_compared(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (9 * random(*shape)).to(dtype)
    assert difference(nn.Identity(), [x], lambda module, x: x.clone()) is None
    other = x.clone()
    other.view(-1)[-1:] += 9j if dtype.is_complex else 9
    assert (difference(nn.Identity(), [x], lambda module, x: other) is None) is (x.numel() == 0)


class Amplifies(nn.Module):
    """A normalisation of nearly equal values: what rounding leaves of their difference is all that there is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        return (x - mean) * torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + 1e-12)


def test_where_values_cancel_right_code_may_be_as_far_off_as_the_original() -> None:
    module, x = Amplifies(), 3 + 1e-6 * random(2, COUNT, WIDTH)
    other = lambda module, x: module(x.flip(-1) + 0.0).flip(-1)  # noqa: E731 (another order of the sums)
    assert difference(module, [x], lambda module, x: other(module, x * (1 + 2**-23))) is None
    assert difference(module, [x], lambda module, x: 8 * module(x)) is not None


def test_the_comparison_leaves_the_module_and_the_random_numbers_as_they_are() -> None:
    class Keeps(Masked):
        def forward(self, x: torch.Tensor, *others: Any) -> torch.Tensor:
            self.kept = super().forward(x)
            return self.kept

    module, x = seeded(Keeps).half(), random(2, COUNT, WIDTH, dtype=torch.float16)
    before, state = dict(module.named_parameters()), torch.get_rng_state()
    assert difference(module, [x], lambda module, x: x.clone()) is not None
    assert torch.equal(state, torch.get_rng_state())
    assert module.kept.dtype is torch.float16
    assert all(weight is before[name] for name, weight in module.named_parameters())


@pytest.mark.parametrize("why", ["another dtype", "no memory"])
def test_a_block_that_cannot_run_in_float32_is_compared_with_a_wider_bound(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class InHalf(Masked):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, code: str = "") -> torch.Tensor:
            if x.dtype is not torch.float16:
                raise TypeError("my kernel knows float16 alone")
            return super().forward(x, mask, code)

    if why == "no memory":
        monkeypatch.setattr(numerics_check, "has_room", lambda device, size: False)
    module = seeded(InHalf if why == "another dtype" else Masked).half()
    x = random(2, COUNT, WIDTH, dtype=torch.float16)
    assert difference(module, [x], scaled(1.01)) is None
    for code in (scaled(1.05), *map(coded, ("no bias", "one row", "one head", "another axis"))):
        assert difference(module, [x], code) is not None


def test_products_of_quantized_weights_have_a_bound_of_their_own() -> None:
    module, x = seeded(Masked).bfloat16(), random(2, COUNT, WIDTH, dtype=torch.bfloat16)
    noisy: Code = lambda module, x: module(x + 0.05 * random(*x.shape, seed=3).to(x.dtype))  # noqa: E731
    assert difference(module, [x], noisy) is not None
    assert difference(module, [x], noisy, ("TensorWiseINT8Layout", "int8")) is None
    assert difference(module, [x], WRONG["identity"], ("TensorWiseINT8Layout", "int8")) is not None


class Overflows(nn.Module):
    """Its result leaves float16's range at some places."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1000


class TestNotFinite:
    x = torch.tensor([[1.0, 2.0, 65.6, 70.0, -80.0, 3.0, 4.0, 5.0]], dtype=torch.float16)

    @pytest.mark.parametrize(
        ("places", "right"),
        [
            ({}, True),
            ({2: 65504.0}, True),  # 65600: the border
            ({3: 0.0}, False),
            ({3: 65504.0}, True),  # the largest number, where it overflows
            ({4: torch.inf}, False),
            ({4: torch.nan}, False),
            ({0: torch.inf}, False),
        ],
        ids=repr,
    )
    def test_what_is_not_finite_is_so_at_the_same_places(self, places: dict[int, float], right: bool) -> None:
        def code(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = module(x)
            for place, value in places.items():
                result[0, place] = value
            return result

        assert (difference(Overflows(), [self.x], code) is None) is right

    def test_where_the_original_overflows_on_its_way_right_code_may_stay_finite(self) -> None:
        class OnItsWay(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * 1000 / 1000

        assert difference(OnItsWay(), [self.x], lambda module, x: x.clone()) is None
        assert difference(OnItsWay(), [self.x], lambda module, x: module(x)) is None
        assert difference(OnItsWay(), [self.x], lambda module, x: module(x).nan_to_num(0, 0, 0)) is not None

    @pytest.mark.parametrize("value", [torch.nan, 70.0])
    def test_values_that_are_mostly_not_finite_show_nothing(self, value: float) -> None:
        x = torch.full((2, 8), value, dtype=torch.float16)
        with pytest.raises(NotComparedError, match="too few values are finite"):
            difference(Overflows(), [x], lambda module, x: module(x) + 0)

    def test_code_that_such_a_call_cannot_compare_is_compared_by_the_next(self) -> None:
        class Passed(Block):
            dims = (TOKENS,)

        rig = Rig(InductorBackend(), workers=0)
        bound = rig.bind(nn.Sequential(seeded(Passed), seeded(Passed)))
        with rig.expect({"observed_input": 1}, verifications=1, eager_calls=1):
            assert bound(tokens() * torch.nan).isnan().all()
        with rig.expect(region_compiles=1, verifications=1, region_calls=4, graph_calls=2):
            assert bound.error(tokens()) <= TOLERANCE
            assert bound.error(tokens(9)) <= TOLERANCE

    def test_a_mask_that_a_block_hands_through_needs_no_finite_values(self) -> None:
        module, x = seeded(Masked), random(2, COUNT, WIDTH)
        mask = torch.full((2, 1, 1, COUNT), -torch.inf)
        mask[..., :5] = 0

        class Both(nn.Module):
            def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
                return module(x, mask), mask

        assert difference(Both(), [x, mask], lambda both, x, mask: both(x, mask.clone())) is None
        with pytest.raises(NotComparedError):
            difference(Both(), [x, mask], lambda both, x, mask: (both(x, mask)[0], mask.clamp(min=-9)))
