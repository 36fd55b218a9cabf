"""Row 5: kinds of ControlNets that core builds differently: SDXL's, unions, T2I adapters and ControlLoras."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.server.process import ComfyServer

from ..rig import PromptDict, assert_different, compiled, node
from .controlling import (
    BOTH,
    STEPS,
    all_compiled,
    assert_cores_error,
    check_control,
    controlled,
    hint,
    with_compiled_nets,
)
from .kit import Check


@pytest.mark.usefixtures("warm_sdxl")
class TestSDXL:
    @pytest.mark.parametrize(("width", "height"), [(136, 104), (72, 136)])
    def test_its_controlnet_has_nothing_left_to_compile(
        self, checked: Check, tiny_prompt: Any, seed: int, width: int, height: int
    ) -> None:
        whole = tiny_prompt(kind="sdxl", seed=seed, width=width, height=height, steps=STEPS)
        run = check_control(checked, controlled(whole, "sdxl"), BOTH + 1)
        assert_different(run, checked.bench.run(whole))

    def test_on_the_wrong_model_it_gives_the_error_that_core_gives(self, checked: Check, prompt: PromptDict) -> None:
        assert_cores_error(checked, controlled(prompt, "sdxl"), "did you try using a controlnet for SDXL on SD1?")


class TestUnion:
    @pytest.fixture
    def typed(self, prompt: PromptDict) -> PromptDict:
        """The prompt with a union ControlNet whose type is set."""
        setting = {"typed": node("SetUnionControlNetType", control_net=["union", 0], type="depth")}
        return controlled({**controlled(prompt, "union"), **setting}, "typed")

    @pytest.mark.parametrize("kind", ["openpose", "segment", "auto"])
    def test_any_type_of_picture_compiles_nothing(self, checked: Check, typed: PromptDict, kind: str) -> None:
        depth = checked.bench.run(typed)
        typed["typed"]["inputs"]["type"] = kind
        assert_different(check_control(checked, typed), depth)

    def test_the_type_may_be_set_before_or_after_compiling(self, checked: Check, typed: PromptDict) -> None:
        first = checked(typed, all_compiled(typed, checked.backend), forwards=BOTH)
        ours = compiled(typed, checked.backend)
        ours["compiled-typed"] = node("ResoluteCompileControlNet", control_net=["typed", 0], backend=checked.backend)
        ours["apply-0"]["inputs"]["control_net"] = ["compiled-typed", 0]
        typed["sample"]["inputs"]["denoise"] = ours["sample"]["inputs"]["denoise"] = 0.999999  # not in ComfyUI's cache
        checked(typed, ours, forwards=BOTH)
        assert first.latents

    def test_a_type_that_it_does_not_have_gives_the_error_that_core_gives(
        self, checked: Check, typed: PromptDict
    ) -> None:
        typed["typed"]["inputs"]["type"] = "repaint"
        assert_cores_error(checked, typed, "Control type repaint(7) is out of range")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("adapter", "a T2I adapter runs once per picture, not once per step: there is nothing to compile"),
        ("lora", "a ControlLora is built anew from the model in every run, so it runs eagerly"),
    ],
    ids=["adapter", "lora"],
)
class TestWhatIsNotCompiled:
    @pytest.mark.grid(4)
    @pytest.mark.parametrize("size", [(128, 128), (136, 104)], ids=["even", "odd"])
    def test_is_returned_unchanged_with_a_reason(
        self,
        checked: Check,
        tiny_prompt: Any,
        seed: int,
        server: ComfyServer,
        name: str,
        reason: str,
        size: tuple[int, int],
    ) -> None:
        whole = tiny_prompt(seed=seed, width=size[0], height=size[1], steps=STEPS)
        before = server.log().count(reason)
        plain = controlled(whole, name, picture=hint(width=size[0], height=size[1]))
        run = check_control(checked, plain, STEPS + 1)
        assert server.log().count(reason) == before + 1
        assert_different(run, checked.bench.run(whole))

    def test_works_on_a_model_that_is_not_compiled(
        self, checked: Check, prompt: PromptDict, name: str, reason: str
    ) -> None:
        plain = controlled(prompt, name)
        checked(plain, with_compiled_nets(plain, checked.backend), forwards=0)

    @pytest.mark.grid(2)
    @pytest.mark.parametrize("order", ["first", "second"])
    def test_adds_to_a_compiled_controlnet(
        self, checked: Check, prompt: PromptDict, name: str, reason: str, order: str
    ) -> None:
        plain = controlled(prompt, *((name, "net") if order == "first" else ("net", name)))
        run = check_control(checked, plain)
        for alone in (name, "net"):
            assert_different(run, checked.bench.run(controlled(prompt, alone)))

    def test_begins_and_ends_within_a_run(self, checked: Check, prompt: PromptDict, name: str, reason: str) -> None:
        run = check_control(checked, controlled(prompt, name, start_percent=0.2, end_percent=0.8), STEPS)
        for whole in (prompt, controlled(prompt, name)):
            assert_different(run, checked.bench.run(whole))
