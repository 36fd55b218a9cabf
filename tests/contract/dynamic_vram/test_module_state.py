"""ModuleState: versions of addresses, settings and code, the epoch that they make, and what forbids a capture."""

from __future__ import annotations

import dataclasses
import gc
import types
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from comfy_kitchen.tensor import QuantizedTensor
from torch import nn


@pytest.fixture
def residency(adapter: Callable[[str], ModuleType], comfy: None) -> ModuleType:
    return adapter("module_state.module_state")


class Operation(nn.Linear):
    """Like ComfyUI's operations: may cast, or patch, its weights on the way in."""

    comfy_cast_weights = False

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.eps = 1e-6
        self.weight_function: list[Any] = []
        self.bias_function: list[Any] = []


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Operation(), Operation()
        self.second.sizes, self.second.nested = [1, 2], ([1, 2], 3)  # in its place: the first can be remembered
        self.register_buffer("table", torch.zeros(3))


@pytest.fixture
def module() -> Module:
    return Module()


@pytest.fixture
def watched(residency: ModuleType, module: Module) -> Any:
    watched = residency.ModuleState(module)
    watched.refresh()
    return watched


def page_out(module: Module) -> None:
    module.first.weight = nn.Parameter(module.first.weight.detach().to("meta"))


def page_first(module: Module, address: int = 4096) -> None:
    """DynamicVRAM has pages for the first operation, and its parameters stay on the host."""
    module.first.to("meta")
    module.first._v = (page_first, address, 80)  # any object is a reservation, until a page is asked for
    module.first._v_signature = None


def copy_of(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().clone()


MOVES: dict[str, Callable[[Any], object]] = {
    "rebind a parameter": lambda module: setattr(module.first, "weight", nn.Parameter(copy_of(module.first.weight))),
    "swap its data": lambda module: setattr(module.first.weight, "data", copy_of(module.first.weight)),
    "rebind a buffer": lambda module: setattr(module, "table", torch.ones(3)),
    "move everything": lambda module: module.to(torch.float16),
    "drop a bias": lambda module: setattr(module.first, "bias", None),
    "page out": page_out,
}


@pytest.mark.parametrize("move", MOVES)
def test_weights_that_move_begin_a_new_epoch_at_the_next_call(watched: Any, module: Module, move: str) -> None:
    before, kept = watched.epoch, list(module.parameters())  # kept: a freed address could be handed out again
    MOVES[move](module)
    watched.refresh()
    assert watched.epoch > before
    after = watched.epoch
    watched.refresh()
    watched.refresh(inspect_modules=True)
    assert watched.epoch == after
    assert kept


def flip_cast(module: Module) -> None:
    module.first.comfy_cast_weights = True


def patch_weight(module: Module) -> None:
    module.first.weight_function = [lambda weight: weight]


def patch_bias(module: Module) -> None:
    module.second.bias_function = [lambda bias: bias]


def exchange_submodule(module: Module) -> None:
    module.second = Operation()


CHANGES: dict[str, Callable[[Any], object]] = {
    "a cast": flip_cast,
    "a patch of a weight": patch_weight,
    "a patch of a bias": patch_bias,
    "a setting": lambda module: setattr(module.first, "eps", 1e-5),
    "a list in place": lambda module: module.second.sizes.append(3),
    "a nested list in place": lambda module: module.second.nested[0].append(3),
    "a hook": lambda module: module.first.register_forward_hook(lambda *_: None),
    "another submodule": exchange_submodule,
    "a new parameter": lambda module: module.register_parameter("extra", nn.Parameter(torch.zeros(1))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_leaves_the_addresses_alone_begins_a_new_epoch_when_a_run_starts(
    watched: Any, module: Module, change: str
) -> None:
    watched.refresh(inspect_modules=True)  # what can be remembered is
    before = watched.epoch
    CHANGES[change](module)
    watched.refresh(inspect_modules=True)
    assert watched.epoch > before


def test_an_exchanged_submodules_weights_are_watched_from_then_on(watched: Any, module: Module) -> None:
    exchange_submodule(module)
    watched.refresh(inspect_modules=True)
    before = watched.epoch
    module.second.weight = nn.Parameter(torch.zeros(4, 4))
    watched.refresh()
    assert watched.epoch > before


def exchange_linear(module: Module) -> None:
    torch.nn.functional.linear = torch.nn.functional.bilinear  # type: ignore[assignment]


VERSIONS: dict[str, tuple[Callable[[Any], object], set[str]]] = {
    "rebind a parameter": (MOVES["rebind a parameter"], {"addresses"}),
    "a cast": (flip_cast, {"addresses"}),
    "another dtype": (MOVES["move everything"], {"addresses", "settings"}),
    "a setting": (CHANGES["a setting"], {"settings"}),
    "a hook": (CHANGES["a hook"], {"settings"}),
    "another submodule": (exchange_submodule, {"addresses", "settings"}),
    "a function that the code calls": (exchange_linear, {"code"}),
}


@pytest.mark.parametrize("change", VERSIONS)
def test_each_change_is_a_new_version_of_what_changed_alone(
    watched: Any, module: Module, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)  # it is put back
    watched.refresh(inspect_modules=True)
    before, kept = dict(watched.versions), list(module.parameters())
    act, changed = VERSIONS[change]
    act(module)
    watched.refresh(inspect_modules=True)
    assert {name for name, version in watched.versions.items() if version != before[name]} == changed
    assert kept


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_look_between_two_runs_leaves_the_epoch_and_the_next_run_begins_one(
    watched: Any, module: Module, is_loaded: bool
) -> None:
    before = watched.epoch
    module.first.eps = 1e-5
    if not is_loaded:
        module.to("meta")
    for _ in range(2):
        watched.look()
        settings = watched.versions["settings"]
    assert watched.epoch == before
    watched.refresh(inspect_modules=True)
    assert (watched.epoch > before, watched.versions["settings"]) == (True, settings)


def test_a_look_at_a_state_that_is_gone_at_the_next_run_begins_no_epoch(watched: Any, module: Module) -> None:
    """As at a model that ComfyUI unloaded: its weights have the dtype of the file until it is loaded again."""
    watched.refresh(inspect_modules=True)
    before = watched.epoch, dict(watched.versions)
    module.first.unloaded = True
    watched.look()
    assert watched.versions != before[1]
    del module.first.unloaded
    watched.refresh(inspect_modules=True)
    assert (watched.epoch, watched.versions) == before


@pytest.mark.parametrize("inspect_modules", [False, True])
def test_without_a_change_the_epoch_stays(watched: Any, module: Module, inspect_modules: bool) -> None:
    before = watched.epoch
    with torch.no_grad():
        module.first.weight.mul_(2)  # values in place: a replay reads them anew
    module.requires_grad_(False)
    for _ in range(3):
        watched.refresh(inspect_modules=inspect_modules)
    assert watched.epoch == before


@pytest.mark.parametrize("holder", ["", "first"])
def test_a_model_that_is_watched_goes_when_everybody_else_lets_go(residency: ModuleType, holder: str) -> None:
    module = Module()
    module.get_submodule(holder).forward = module.forward  # a method bound to the model, as core leaves it there
    module.get_submodule(holder).__dict__["model"] = [module]
    watched, gone = residency.ModuleState(module), weakref.ref(module)
    watched.refresh(inspect_modules=True)
    del module
    gc.collect()
    assert gone() is None
    watched.refresh(inspect_modules=True)


@pytest.mark.parametrize("name", ["holders", "weight_function"])
def test_a_model_goes_though_it_was_put_into_a_list_that_was_seen_empty(residency: ModuleType, name: str) -> None:
    module = Module()
    module.first.__dict__[name] = found = []  # type: ignore[var-annotated]
    watched, gone = residency.ModuleState(module), weakref.ref(module)
    for _ in range(2):
        watched.refresh(inspect_modules=True)
        found.append(module)
    del module, found
    gc.collect()
    assert gone() is None


def test_two_modules_never_share_an_epoch(residency: ModuleType, watched: Any) -> None:
    other = residency.ModuleState(Module())
    other.refresh()
    assert other.epoch != watched.epoch


def test_weights_that_come_back_begin_a_new_epoch_too(watched: Any, module: Module) -> None:
    original, epochs = module.first.weight, {watched.epoch}
    for weight in (nn.Parameter(torch.zeros(4, 4)), original):
        module.first.weight = weight
        watched.refresh()
        epochs.add(watched.epoch)
    assert len(epochs) == 3


class TestBlockers:
    @pytest.mark.parametrize("where", ["", "first"])
    def test_a_method_that_a_pack_replaced_forbids_a_capture_until_it_is_gone(
        self, watched: Any, module: Module, where: str
    ) -> None:
        before, changed = watched.epoch, module.get_submodule(where)
        changed.extra_repr = lambda: ""  # type: ignore[method-assign]  # any method: which one computes is not ours to say
        watched.refresh(inspect_modules=True)
        assert watched.blocker.code.value == "replaced_forward"
        assert watched.epoch > before
        del changed.extra_repr
        watched.refresh(inspect_modules=True)
        assert watched.blocker is None

    def test_a_cast_on_the_way_forbids_nothing(self, watched: Any, module: Module) -> None:
        assert watched.blocker is None
        flip_cast(module)
        watched.refresh(inspect_modules=True)
        assert watched.blocker is None

    @pytest.mark.parametrize("change", [patch_weight, patch_bias], ids=lambda change: change.__name__)
    def test_a_patch_on_the_way_forbids_a_capture(
        self, watched: Any, module: Module, change: Callable[[Module], None]
    ) -> None:
        change(module)
        watched.refresh(inspect_modules=True)
        assert watched.blocker.code.value == "streamed_weights"
        assert "patched" in watched.blocker.detail

    def test_weights_on_two_devices_forbid_a_capture(self, watched: Any, module: Module) -> None:
        page_out(module)
        watched.refresh()
        assert watched.blocker.code.value == "streamed_weights"
        assert "cpu and meta" in watched.blocker.detail

    def test_weights_that_are_nowhere_forbid_a_capture(self, watched: Any, module: Module) -> None:
        module.to("meta")
        watched.refresh(inspect_modules=True)
        assert watched.blocker is not None
        assert watched.blocker.code.value == "streamed_weights"

    def test_paged_weights_forbid_nothing_wherever_their_parameters_are(
        self, residency: ModuleType, module: Module
    ) -> None:
        watched = residency.ModuleState(module, host="meta")
        page_first(module)
        watched.refresh()
        assert watched.paged.pages
        assert watched.blocker is None

    def test_a_small_weight_that_is_left_on_the_host_beside_paged_ones_forbids_a_capture(
        self, residency: ModuleType, module: Module
    ) -> None:
        watched = residency.ModuleState(module)  # here the CPU is the host
        page_first(module)
        watched.refresh()
        assert watched.blocker.code.value == "streamed_weights"
        assert "on cpu" in watched.blocker.detail

    def test_other_pages_begin_a_new_epoch_and_other_contents_do_not(
        self, residency: ModuleType, module: Module
    ) -> None:
        watched = residency.ModuleState(module, host="meta")
        page_first(module)
        watched.refresh()
        before = watched.epoch
        module.first._v_signature = None
        watched.paged.loaded()
        watched.refresh(inspect_modules=True)
        assert watched.epoch == before
        page_first(module, address=8192)
        watched.paged.loaded()
        watched.refresh()
        assert watched.epoch > before

    def test_weights_that_came_back_forbid_nothing(self, watched: Any, module: Module) -> None:
        patch_weight(module)
        watched.refresh(inspect_modules=True)
        module.first.weight_function = []
        watched.refresh(inspect_modules=True)
        assert watched.blocker is None


class Quantized(torch.Tensor):
    """As GGUF's: the data at one address, and what a LoRA changes in an attribute."""


class TestQuantizedWeights:
    """Core's, which list their parts: a number and a scale, each at an address."""

    @pytest.fixture
    def quantized(self, watched: Any, module: Module) -> Module:
        quantize(module, torch.randn(4, 4))
        watched.refresh()
        assert watched.blocker is None
        return module

    def test_nothing_is_read_of_them_again_while_nothing_moves(
        self, watched: Any, quantized: Module, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def flatten(weight: Any) -> Any:
            raise AssertionError("it takes 10 us for each weight")

        monkeypatch.setattr(QuantizedTensor, "__tensor_flatten__", flatten)
        before = watched.epoch
        assert not watched.refresh()
        assert watched.epoch == before

    def test_the_same_parts_in_another_wrapper_are_no_change(self, watched: Any, quantized: Module) -> None:
        before, weight = watched.epoch, quantized.first.weight
        made = QuantizedTensor(weight._qdata, weight._layout_cls, weight._params)
        quantized.first.weight = nn.Parameter(made, requires_grad=False)
        quantized.first.weight._params = weight._params  # a Parameter clones them
        watched.refresh()
        assert watched.epoch == before

    @pytest.mark.parametrize("change", [{"scale": torch.ones(())}, {"convrot": True}], ids=["scale", "layout"])
    def test_another_scale_and_another_layout_are_seen_at_the_next_call(
        self, watched: Any, quantized: Module, change: dict[str, Any]
    ) -> None:
        before, weight = watched.epoch, quantized.first.weight
        params = dataclasses.replace(weight._params, **change)
        quantized.first.weight = nn.Parameter(QuantizedTensor(weight._qdata, weight._layout_cls, params), False)
        watched.refresh()
        assert watched.epoch > before

    def test_numbers_that_moved_inside_one_weight_are_seen_too(self, watched: Any, quantized: Module) -> None:
        before = watched.epoch
        quantized.first.weight._qdata = quantized.first.weight._qdata.clone()
        watched.refresh()
        assert watched.epoch > before

    def test_a_weight_that_is_quantized_no_more(self, watched: Any, quantized: Module) -> None:
        before = watched.epoch
        quantized.first.weight = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        watched.refresh()
        assert watched.epoch > before
        assert watched.blocker is None


def quantize(module: Module, weight: torch.Tensor) -> None:
    made = QuantizedTensor.from_float(weight, "TensorWiseINT8Layout")
    module.first.weight = nn.Parameter(made, requires_grad=False)


class TestWhatIsNotCoresOwn:
    def test_a_weight_that_is_more_than_its_data_forbids_a_capture(self, watched: Any, module: Module) -> None:
        before = watched.epoch
        module.first.weight = nn.Parameter(module.first.weight.detach().as_subclass(Quantized), requires_grad=False)
        watched.refresh(inspect_modules=True)
        assert watched.epoch != before
        assert watched.blocker.code.value == "unreadable_weights"
        assert "Quantized" in watched.blocker.detail

    def test_a_buffer_of_that_kind_does_too(self, watched: Any, module: Module) -> None:
        module.table = torch.zeros(3).as_subclass(Quantized)
        watched.refresh(inspect_modules=True)
        assert watched.blocker.code.value == "unreadable_weights"

    @pytest.fixture
    def strange(self, adapter: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(adapter("trust.packs"), "KNOWN_PACKAGES", frozenset({"torch"}))

    def test_a_class_of_another_pack_forbids_a_capture_and_is_named(
        self, residency: ModuleType, module: Module, strange: None
    ) -> None:
        watched = residency.ModuleState(module)
        watched.refresh()
        assert watched.blocker.code.value == "foreign_model"
        assert f"{Module.__module__}.Module" in watched.blocker.detail
        assert "RESOLUTE_TRUSTED_CLASSES" in watched.blocker.detail

    def test_a_class_that_a_person_named_may_be_captured(
        self, residency: ModuleType, module: Module, strange: None
    ) -> None:
        both = {f"{kind.__module__}.{kind.__qualname__}" for kind in (Module, Operation)}
        watched = residency.ModuleState(module, both)
        watched.refresh()
        assert watched.blocker is None

    @pytest.mark.parametrize("where", ["inside", "outside"])
    def test_a_function_that_another_pack_exchanged_is_another_epoch_until_it_is_back(
        self, watched: Any, monkeypatch: pytest.MonkeyPatch, where: str
    ) -> None:
        before = watched.epoch
        strange = types.FunctionType(forward_of_strange.__code__, {"__name__": "custom_nodes.strange"})
        with monkeypatch.context() as patch:
            # nn.Linear calls `linear`, and never `silu`.
            patch.setattr(torch.nn.functional, "linear" if where == "inside" else "silu", strange)
            watched.refresh(inspect_modules=True)
            if where == "outside":
                assert (watched.epoch, watched.blocker) == (before, None)
                return
            assert watched.epoch != before
            assert watched.blocker.code.value == "replaced_forward"
            assert "torch.nn.functional.linear" in watched.blocker.detail
        watched.refresh(inspect_modules=True)
        assert watched.blocker is None

    def test_functions_that_manage_memory_may_change_at_any_time(
        self, adapter: Callable[[str], ModuleType], module: Module, residency: ModuleType, monkeypatch: Any
    ) -> None:
        """Core sets `memory_management.extra_ram_release_callback` for each prompt, which once cost a capture each."""
        monkeypatch.setattr(adapter("trust.model_code"), "MANAGEMENT_MODULES", frozenset({"torch.nn.functional"}))
        watched = residency.ModuleState(module)
        watched.refresh()
        before = watched.epoch
        strange = types.FunctionType(forward_of_strange.__code__, {"__name__": "custom_nodes.strange"})
        monkeypatch.setattr(torch.nn.functional, "linear", strange)
        watched.refresh(inspect_modules=True)
        assert (watched.epoch, watched.blocker) == (before, None)

    def test_a_model_that_reads_the_noise_level_is_not_captured(self, residency: ModuleType) -> None:
        module = ReadsSigmas()
        watched = residency.ModuleState(module)
        watched.refresh()
        assert watched.blocker.code.value == "observed_input"


def forward_of_strange(*args: Any) -> Any:
    return args


class ReadsSigmas(Module):
    def forward(self, x: Any, transformer_options: Any) -> Any:
        return x * transformer_options["sigmas"][0]


def test_a_class_that_holds_the_model_does_not_keep_it_alive(residency: ModuleType) -> None:
    def added_to(model: Module) -> nn.Module:
        class Reader(nn.Module):
            def forward(self, x: Any) -> Any:
                return model.table + x

        return Reader()

    model = Module()
    model.reader = added_to(model)
    watched = residency.ModuleState(model)
    watched.refresh()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
