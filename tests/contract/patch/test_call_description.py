"""The description of a call: its tensors and values, how to call again with others, and what forbids a capture."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ..odd_values import ODD


@pytest.fixture(scope="module")
def signature(adapter: Callable[[str], ModuleType]) -> ModuleType:
    return adapter("patch.call_description")


@pytest.fixture
def description(signature: ModuleType) -> Any:
    return signature.CallDescription()


def blocker(description: Any) -> str:
    """The code and the sentence that forbid a capture, empty where nothing does."""
    return "" if description.policy.reason is None else str(description.policy.reason)


OF_CORE = type("UNetModel", (torch.nn.Module,), {"__module__": "comfy.ldm.modules.diffusionmodules.openaimodel"})()
OF_SEEDVR = type("NaDiT", (torch.nn.Module,), {"__module__": "comfy.ldm.seedvr.model"})()
OF_A_PACK = type("Model", (torch.nn.Module,), {"__module__": "some_pack.model"})()


def patch(*args: Any) -> Any:
    """Stands for another node's function."""
    return args[0]


class TestTensors:
    def test_they_are_taken_in_order_with_their_names(self, description: Any) -> None:
        latent, context = torch.zeros(2, 4, 8, 8), torch.zeros(2, 77, 16, dtype=torch.float16)
        description.add("latent", latent)
        description.add("context", context)
        assert description.tensors[0] is latent
        assert description.tensors[1] is context
        signature = description.signature()
        assert [name for name, _ in signature.tensors] == ["latent", "context"]
        assert signature.latent_shape == (2, 4, 8, 8)
        assert (signature.tensors[1][1].dtype, signature.tensors[1][1].device) == ("float16", "cpu")

    def test_they_are_built_again_from_replacements(self, description: Any) -> None:
        builds = [description.add(name, torch.zeros(1)) for name in "ab"]
        replacements = [torch.ones(1), torch.full((1,), 2.0)]
        assert [build(replacements) for build in builds] == replacements

    def test_channels_last_is_told_from_contiguous(self, signature: ModuleType) -> None:
        tensor = torch.zeros(2, 4, 8, 8)
        specs = [signature.tensor_spec(t) for t in (tensor, tensor.to(memory_format=torch.channels_last))]
        assert [spec.memory_format for spec in specs] == ["contiguous", "channels_last"]

    def test_other_strides_do_not_matter(self, signature: ModuleType) -> None:
        tensor = torch.zeros(2, 4, 8, 16)
        assert signature.tensor_spec(tensor[..., ::2]) == signature.tensor_spec(torch.zeros(2, 4, 8, 8))

    def test_a_tensor_of_a_foreign_class_forbids_a_capture(self, description: Any) -> None:
        class Quantized(torch.Tensor):
            pass

        description.add("latent", torch.zeros(1).as_subclass(Quantized))
        assert "Quantized" in blocker(description)


class TestValues:
    @pytest.mark.parametrize("value", [None, True, 1, 1.0, "mode"])
    def test_plain_values_are_part_of_the_signature_and_come_back(self, description: Any, value: Any) -> None:
        build = description.add("scale", value)
        assert description.signature().values == (("scale", value),)
        assert build([]) is value
        assert blocker(description) == ""

    @pytest.mark.parametrize(
        "value", [object(), patch, {1, 2}, SimpleNamespace(a=1), torch.Size((1,)), 1j, b"x"], ids=repr
    )
    def test_what_a_capture_cannot_follow_forbids_it_by_name(self, description: Any, value: Any) -> None:
        build = description.add("extra", value)
        assert blocker(description).startswith("observed_input: 'extra' is a ")
        assert build([]) is value

    def test_something_hidden_in_a_container_forbids_it_too(self, description: Any) -> None:
        description.add("extra", {"a": [1, {"b": object()}]})
        assert "'extra.a[1].b' is a object" in blocker(description)

    def test_the_first_reason_stays(self, description: Any) -> None:
        description.add("first", object())
        description.add("second", object())
        assert "'first'" in blocker(description)


def control() -> dict[str, Any]:
    """ControlNet residuals as core hands them over: lists, with gaps."""
    return {"output": [torch.zeros(1), None, torch.ones(1)], "middle": [torch.full((1,), 2.0)], "input": []}


class TestControl:
    def test_it_is_rebuilt_with_its_gaps(self, description: Any) -> None:
        build = description.add("control", control())
        assert len(description.tensors) == 3
        built = build([torch.full((1,), float(i)) for i in (10, 11, 12)])
        assert {key: [None if t is None else float(t) for t in value] for key, value in built.items()} == {
            "output": [10.0, None, 11.0],
            "middle": [12.0],
            "input": [],
        }
        assert blocker(description) == ""

    def test_popping_in_one_call_does_not_reach_the_next(self, description: Any) -> None:
        given = control()
        build = description.add("control", given)
        first = build(description.tensors)
        while first["output"]:
            first["output"].pop()
        first.clear()
        assert [len(value) for value in build(description.tensors).values()] == [3, 1, 0]
        assert len(given["output"]) == 3

    def test_tuples_stay_tuples(self, description: Any) -> None:
        built = description.add("sizes", (1, [2, (3,)]))([])
        assert built == (1, [2, (3,)])
        assert type(built[1][1]) is tuple

    @pytest.mark.parametrize(
        "other",
        [
            {"output": [torch.zeros(1), torch.zeros(1), None], "middle": [torch.zeros(1)], "input": []},
            {"output": [torch.zeros(1), None, torch.zeros(1)], "middle": [], "input": [torch.zeros(1)]},
            {"output": [torch.zeros(1), None, torch.zeros(1)], "middle": [torch.zeros(1)]},
            {"output": [torch.zeros(1), None, torch.zeros(2)], "middle": [torch.zeros(1)], "input": []},
            None,
        ],
        ids=["another gap", "another block", "another key", "another shape", "none"],
    )
    def test_another_form_is_another_signature(self, signature: ModuleType, other: Any) -> None:
        signatures = []
        for value in (control(), other):
            description = signature.CallDescription()
            description.add("latent", torch.zeros(1))
            description.add("control", value)
            signatures.append(description.signature())
        assert signatures[0] != signatures[1]

    def test_other_residuals_of_the_same_form_are_the_same_signature(self, signature: ModuleType) -> None:
        signatures = []
        for _ in range(2):
            description = signature.CallDescription()
            description.add("control", control())
            signatures.append(description.signature())
        assert signatures[0] == signatures[1]


class TestOptions:
    """transformer_options: what may change the computation forbids a capture."""

    QUIET = [
        {},
        {"cond_or_uncond": [0, 1], "sigmas": torch.ones(2), "uuids": ["a"], "wrappers": {}, "callbacks": {}},
        {"patches": {}, "patches_replace": {}},
        {"patches": {"attn1_patch": []}, "patches_replace": {"attn1": {}}},
        {"patches": None},
    ]

    @pytest.mark.parametrize("options", QUIET, ids=str)
    def test_what_core_itself_puts_there_does_not(self, description: Any, options: dict[str, Any]) -> None:
        description.add_options(options, OF_CORE)
        assert blocker(description) == ""

    @pytest.mark.parametrize(
        "name", ["output_block_patch", "input_block_patch", "middle_patch", "attn1_patch", "attn2_output_patch"]
    )
    def test_a_patch_does_and_is_named(self, description: Any, name: str) -> None:
        description.add_options({"patches": {name: [patch]}}, OF_CORE)
        assert blocker(description) == f"observed_input: another node patches the model ({name})"

    def test_a_replacement_does(self, description: Any) -> None:
        description.add_options({"patches_replace": {"attn1": {("middle", 0): patch}}}, OF_CORE)
        assert "attn1" in blocker(description)

    @pytest.mark.parametrize("name", ["optimized_attention_override", "my_pack_setting", "unet_wrapper"])
    def test_an_option_that_nobody_knows_does(self, description: Any, name: str) -> None:
        description.add_options({"sigmas": torch.ones(1), name: 1}, OF_CORE)
        assert f"'{name}'" in blocker(description)

    @pytest.mark.parametrize(("module", "looks"), [(OF_CORE, False), (OF_SEEDVR, True), (OF_A_PACK, True)])
    def test_the_order_of_texts_counts_for_models_that_may_look_at_it(
        self, signature: ModuleType, module: Any, looks: bool
    ) -> None:
        forms = []
        for order in ([0, 1], [0, 0]):
            description = signature.CallDescription()
            description.add("latent", torch.zeros(2, 4, 8, 8))
            description.add_options({"cond_or_uncond": order}, module)
            forms.append(description.quick_key())
        assert (forms[0] != forms[1]) is looks


class Whole(torch.nn.Module):
    def forward(self, z: torch.Tensor, scale: float = 1.0, **kwargs: object) -> torch.Tensor:
        return z * scale


class Split(Whole):
    def _forward(self, x: torch.Tensor, timesteps: torch.Tensor, context: object = None) -> torch.Tensor:
        return x


@pytest.fixture(scope="module")
def argument_names(adapter: Callable[[str], ModuleType]) -> Callable[..., list[str]]:
    names: Callable[..., list[str]] = adapter("patch.forward_patch").argument_names
    return names


def test_arguments_have_the_names_that_the_forward_gives_them(argument_names: Callable[..., list[str]]) -> None:
    assert argument_names(Whole(), Whole().forward) == ["z", "scale"]
    assert argument_names(Split(), Split()._forward) == ["x", "timesteps", "context"]


def test_a_replacement_that_takes_any_arguments_has_the_names_of_the_original(
    argument_names: Callable[..., list[str]],
) -> None:
    def replacement(*args: object, **kwargs: object) -> None: ...

    assert argument_names(Whole(), replacement) == ["z", "scale"]
    assert argument_names(Split(), replacement) == ["x", "timesteps", "context"]


def test_a_model_class_that_takes_any_arguments_has_the_names_of_its_base(
    argument_names: Callable[..., list[str]],
) -> None:
    class OfAPack(Split):
        def _forward(self, *args: Any, **kwargs: Any) -> Any:
            return super()._forward(*args, **kwargs)

    assert argument_names(OfAPack(), OfAPack()._forward) == ["x", "timesteps", "context"]


def test_a_model_class_that_names_no_argument_anywhere_has_no_names(argument_names: Callable[..., list[str]]) -> None:
    class Unnamed(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return args[0]

    assert argument_names(Unnamed(), Unnamed().forward) == []


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("place", [lambda value: value, lambda value: [{"a": (value,)}]], ids=["itself", "inside"])
def test_whatever_a_call_gets_is_described_and_passed_on(description: Any, name: str, place: Any) -> None:
    build = description.add("value", place(ODD[name]))
    description.quick_key()
    hash(description.signature())
    made = build(description.tensors)
    if place(ODD[name]) is not ODD[name]:
        made = made[0]["a"][0]
    plain = (list, dict, torch.Tensor)
    assert made is ODD[name] or type(made) in plain


@pytest.mark.parametrize("name", ODD)
def test_whatever_the_options_hold_only_a_capture_is_refused(
    description: Any, adapter: Callable[[str], ModuleType], name: str
) -> None:
    known = adapter("comfyui.transformer_options")
    for key in (*known.MEANINGS, "unknown"):
        description.add_options({key: ODD[name]}, OF_CORE)
    description.quick_key()
    assert blocker(description)
