"""The structure of a module: whatever a trace of it depends on changes the digest, and nothing else does."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from compile_cache.attribute_policy import ModuleAttributePolicy
from compile_cache.modules.structure import structure_digest

from ...programs import python_calls
from ..rig import Attention, Convolution, Model, seeded


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


class Block(nn.Module):
    """Settings of every kind that a block may hold."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.plain: Any = None
        for name, value in settings.items():
            setattr(self, name, value)


class Subclass(Block):
    pass


def block(change: Callable[[Any], None] = lambda module: None, **settings: Any) -> nn.Module:
    module = seeded(lambda: Block(**settings))
    change(module)
    return module


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def power(x: torch.Tensor, exponent: int) -> torch.Tensor:
    return x**exponent


SETTINGS: list[tuple[Any, Any]] = [
    (1, 2),
    (1, 1.0),
    (1, True),
    (None, False),
    ("a", "b"),
    ((1, 2), (2, 1)),
    ([1, 2], [1, 3]),
    ((1, (2, 3)), (1, (2, 4))),
    (torch.float16, torch.float32),
    (torch.nn.functional.relu, torch.nn.functional.gelu),
    (double, torch.sin),
    (torch.Size((1, 2)), torch.Size((2, 2))),
    ({"scale": 1}, {"scale": 2}),
    ({1, 2}, {1, 3}),
    (Mode.FAST, Mode.EXACT),
    (slice(0, 2), slice(0, 3)),
    (functools.partial(power, exponent=2), functools.partial(power, exponent=3)),
    ((1, {"a": 1}), (1, {"a": 2})),
]


@pytest.mark.parametrize(("a", "b"), SETTINGS, ids=lambda value: repr(value)[:40])
def test_a_setting_of_any_kind_counts(a: Any, b: Any) -> None:
    assert structure_digest(block(plain=a)) != structure_digest(block(plain=b))


def test_a_container_that_holds_itself_is_no_setting() -> None:
    block = Model()
    itself: dict[str, Any] = {"gain": 2.0}
    itself["again"] = itself["more"] = itself
    block.table = itself  # type: ignore[assignment]
    assert structure_digest(block) == structure_digest(block)


def test_many_numbers_count_without_a_call_for_each() -> None:
    first, second = Model(), Model()
    first.table, second.table = [0.5] * 300_000, [*[0.5] * 299_999, 0.25]  # type: ignore[assignment]
    digests = set[str]()
    calls = python_calls(lambda: digests.update((structure_digest(first), structure_digest(second))))
    assert len(digests) == 2
    assert calls < 5_000


def test_a_private_setting_counts() -> None:
    assert structure_digest(block(_scale=1)) != structure_digest(block(_scale=2))


def tie(module: Any) -> None:
    module.k.weight = module.q.weight


def add_buffer(module: Any) -> None:
    module.register_buffer("table", torch.zeros(3))


def drop_bias(module: Any) -> None:
    module.linear.bias = None


def replace_forward(module: Any) -> None:
    module.linear.forward = double


def replace_forward_by_a_partial(module: Any) -> None:
    module.linear.forward = functools.partial(power, exponent=2)


def hook(module: Any) -> None:
    module.linear.register_forward_hook(lambda module, inputs, output: output * 2)


def hook_before(module: Any) -> None:
    module.linear.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))


def exchange(module: Any) -> None:
    module.linear = nn.Linear(4, 4, bias=False)


def convert(module: Any) -> None:
    module.to(torch.float16)


def parametrize(module: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(module.linear)


CHANGES = [
    add_buffer, drop_bias, replace_forward, replace_forward_by_a_partial, hook, hook_before, exchange, convert,
    parametrize,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_the_computation_counts(change: Callable[[Any], None]) -> None:
    assert structure_digest(block(change)) != structure_digest(block())


def test_the_class_counts() -> None:
    assert structure_digest(seeded(Subclass)) != structure_digest(seeded(Block))


def test_a_shared_weight_is_told_from_two_weights() -> None:
    shared = seeded(Attention)
    tie(shared)
    assert structure_digest(shared) != structure_digest(seeded(Attention))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (lambda: Attention(heads=2), lambda: Attention(heads=4)),
        (lambda: Attention(eps=1e-5), lambda: Attention(eps=1e-6)),
        (lambda: Attention(16), lambda: Attention(32)),
        (lambda: Convolution(8, stride=1), lambda: Convolution(8, stride=2)),
        (lambda: nn.Conv2d(4, 4, 3, padding=1), lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")),
        (lambda: nn.GELU(), lambda: nn.GELU(approximate="tanh")),
        (lambda: nn.Sequential(nn.SiLU(), nn.Tanh()), lambda: nn.Sequential(nn.Tanh(), nn.SiLU())),
    ],
    ids=["heads", "eps", "width", "stride", "padding", "approximate", "order"],
)
def test_blocks_with_other_settings_have_other_structures(a: Any, b: Any) -> None:
    assert structure_digest(seeded(a)) != structure_digest(seeded(b))


class TestWhatDoesNotCount:
    def test_the_values_of_weights(self) -> None:
        assert structure_digest(seeded(Model, 0)) == structure_digest(seeded(Model, 1))

    def test_gradients(self) -> None:
        module = seeded(Model)
        module.requires_grad_(False)
        assert structure_digest(module) == structure_digest(seeded(Model))

    def test_where_weights_are(self) -> None:
        assert structure_digest(seeded(Model).to("meta")) == structure_digest(seeded(Model))

    def test_identity(self) -> None:
        assert structure_digest(block(plain=[1, 2])) == structure_digest(block(plain=[1, 2]))


class TestRules:
    """An attribute that an application writes into its modules counts, unless its policy calls it bookkeeping."""

    ATTRIBUTES = ModuleAttributePolicy(frozenset({"place"}), ("_original_dtype",))

    @pytest.mark.parametrize("name", ["place", "_place", "weight_original_dtype", "original_dtype"])
    def test_a_setting_counts_without_a_policy(self, name: str) -> None:
        assert structure_digest(block(**{name: 1})) != structure_digest(block())

    @pytest.mark.parametrize("name", ["place", "weight_original_dtype"])
    def test_bookkeeping_does_not_count(self, name: str) -> None:
        assert self.digest(block(**{name: 1})) == self.digest(block())

    @pytest.mark.parametrize("name", ["_place", "places", "original_dtype"])
    def test_another_name_counts(self, name: str) -> None:
        assert self.digest(block(**{name: 1})) != self.digest(block())

    def test_they_hold_for_the_modules_below_too(self) -> None:
        module: Any = block()
        module.linear.place = 1
        assert self.digest(module) == self.digest(block())

    def digest(self, module: nn.Module) -> str:
        return structure_digest(module, policy=self.ATTRIBUTES)


class TestRulesOfComfyUI:
    """The policy that the adapter gives to the core."""

    @pytest.fixture
    def digest(self, adapter: Callable[[str], ModuleType]) -> Callable[[nn.Module], str]:
        policy = adapter("comfyui.module_attributes").ATTRIBUTES
        return lambda module: structure_digest(module, policy=policy)

    def test_whether_weights_are_cast_does_not_count_because_it_is_read_with_the_weights(self, digest: Any) -> None:
        modules: list[Any] = [block(), block()]
        for module, casts in zip(modules, (True, False), strict=True):
            module.linear.comfy_cast_weights = casts
        assert digest(modules[0]) == digest(modules[1]) == digest(block())

    @pytest.mark.parametrize("name", ["weight_function", "bias_function"])
    def test_patches_of_weights_do_not_count_because_they_are_read_with_the_weights(
        self, digest: Any, name: str
    ) -> None:
        # ComfyUI leaves an empty list on the instance when a low-VRAM patch is taken back.
        module: Any = block()
        setattr(module.linear, name, [])
        assert digest(module) == digest(block())

    def test_bookkeeping_does_not_count(self, digest: Any) -> None:
        module = block(
            seed_key="blocks.0.linear",
            comfy_patched_weights=True,
            prev_comfy_cast_weights=False,
            weight_comfy_model_dtype=torch.float16,
        )
        assert digest(module) == digest(block())

    def test_a_forced_cast_counts_only_where_code_reads_it(self, digest: Any) -> None:
        """Core gives a model with LoRA hooks to a patcher without pages, which sets it; the one with pages does not."""
        plain, mixed = block(), block(_full_precision_mm=False)
        for forced in (False, True):
            assert digest(block(comfy_force_cast_weights=forced)) == digest(plain)
            changed = digest(block(_full_precision_mm=False, comfy_force_cast_weights=forced)) != digest(mixed)
            assert changed is forced

    def test_where_a_paged_weight_is_does_not_count(self, digest: Any) -> None:
        paged: Any = block()
        paged.linear._v = ("a reservation", 4096, 80)
        paged.linear._v_signature = (1, 0)
        paged.linear._v_block = ("a reservation", 4096, 160)
        assert digest(paged) == digest(block())

    def test_a_setting_counts(self, digest: Any) -> None:
        assert digest(block(scale=2)) != digest(block())


class ReadsMode(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if self.training else x


@pytest.mark.parametrize(
    ("make", "counts"),
    [
        (lambda: Block(plain=1), False),
        (lambda: Block(drop=nn.Dropout(0.0)), False),
        (lambda: Block(drop=nn.Dropout(0.1)), True),
        (lambda: Block(norm=nn.BatchNorm1d(4)), True),
        (ReadsMode, True),
    ],
)
def test_training_mode_counts_where_the_code_reads_it(make: Callable[[], nn.Module], counts: bool) -> None:
    """Core leaves ControlNets in it, and they share the blocks of a UNet, which is not."""
    modes = [structure_digest(seeded(make).train(mode)) for mode in (False, True)]
    assert (modes[0] != modes[1]) == counts
