"""Row 5: ControlNets of any strength, time range, number and size.

The tests count forwards of the UNet and of compiled ControlNets: one each per batch of conditions.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from scripts.server.process import ComfyServer

from ..rig import PromptDict, Run, assert_different, compiled, node, without_decoder
from .controlling import BOTH, STEPS, assert_cores_error, check_control, controlled, hint, with_compiled_nets
from .controlling import all_compiled as everything_compiled
from .kit import Check


def test_the_first_prompt_compiles_only_what_the_unet_does_not_have(warm_control: Run) -> None:
    # It compiles only the convolutions that read the hint, or nothing if another file's tests ran a ControlNet before.
    assert warm_control.rise["region_compiles"] <= 1
    assert warm_control.forwards + warm_control.rise["eager_calls"] == BOTH + 1


def test_two_controlnets_of_one_kind_share_their_regions(checked: Check, prompt: PromptDict) -> None:
    assert_different(*(check_control(checked, controlled(prompt, net)) for net in ("net", "other")))


@pytest.mark.parametrize("strength", [0.5, 1.0, 0.0])
def test_any_strength_compiles_nothing(checked: Check, prompt: PromptDict, strength: float) -> None:
    run = check_control(checked, controlled(prompt, "net", strength=strength), BOTH if strength else STEPS)
    if strength:
        assert_different(run, checked.bench.run(prompt))
        assert_different(run, checked.bench.run(controlled(prompt, "net", strength=1.2 * strength)))


# The steps are at 0, 1/3, 2/3 and 1 of the schedule.
@pytest.mark.grid(3)
@pytest.mark.parametrize(
    ("start", "end", "inside"), [(0.0, 0.5, 2), (0.5, 1.0, 2), (0.2, 0.8, 2), (0.0, 0.1, 1), (0.4, 0.6, 0)]
)
def test_it_begins_and_ends_within_a_run_without_a_compile(
    checked: Check, prompt: PromptDict, start: float, end: float, inside: int
) -> None:
    plain = controlled(prompt, "net", start_percent=start, end_percent=end)
    run = check_control(checked, plain, STEPS + inside)
    if inside:
        assert_different(run, checked.bench.run(prompt))
        assert_different(run, checked.bench.run(controlled(prompt, "net")))


def test_it_can_be_switched_on_and_off_between_prompts(checked: Check, prompt: PromptDict, seeds: Any) -> None:
    for is_on in (True, False, True, False, True):
        prompt["sample"]["inputs"]["seed"] = next(seeds)
        run = check_control(checked, controlled(prompt, "net") if is_on else prompt, BOTH if is_on else STEPS)
        if is_on:
            assert_different(run, checked.bench.run(prompt))


def test_another_hint_changes_the_image(checked: Check, prompt: PromptDict) -> None:
    assert_different(*(check_control(checked, controlled(prompt, "net", picture=hint(seed))) for seed in (5, 6)))


LEAK = "WARNING, memory leak with model"


def test_an_unused_one_is_freed(checked: Check, prompt: PromptDict, server: ComfyServer, seeds: Any) -> None:
    before = server.log().count(LEAK)
    check_control(checked, controlled(prompt, "net"))
    for _ in range(2):  # ComfyUI drops objects that the next prompt does not use, and checks for leaks at each load
        prompt["sample"]["inputs"]["seed"] = next(seeds)
        checked(prompt, forwards=STEPS)
    assert server.log().count(LEAK) == before


def test_one_that_was_compiled_twice_is_freed(
    checked: Check, prompt: PromptDict, server: ComfyServer, seeds: Any
) -> None:
    for compile_all in (everything_compiled, compiled_twice, everything_compiled):
        prompt["sample"]["inputs"]["seed"] = next(seeds)
        plain = controlled(prompt, "net")
        checked(plain, compile_all(plain, checked.backend), forwards=BOTH)
    counts = []
    for _ in range(3):
        prompt["sample"]["inputs"]["seed"] = next(seeds)
        checked(prompt, forwards=STEPS)
        checked(controlled(prompt, "other"), forwards=STEPS)
        counts.append(server.log().count(LEAK))
    # One garbage collection is allowed. A leak would cause one at every load, which costs several times a prompt.
    assert counts[-1] == counts[-2]


def compiled_twice(plain: PromptDict, backend: str) -> PromptDict:
    """The prompt with everything compiled, and two chained compile nodes for the ControlNet."""
    ours = everything_compiled(plain, backend)
    ours["again"] = node("ResoluteCompileControlNet", control_net=["compiled-net", 0], backend=backend)
    ours["apply-0"]["inputs"]["control_net"] = ["again", 0]
    return ours


class TestWhatIsCompiled:
    def test_the_model_alone(self, checked: Check, prompt: PromptDict) -> None:
        checked(controlled(prompt, "net"), forwards=STEPS)

    def test_the_controlnet_alone(self, checked: Check, prompt: PromptDict) -> None:
        plain = controlled(prompt, "net")
        checked(plain, with_compiled_nets(plain, checked.backend), forwards=STEPS)

    def test_a_controlnet_that_is_compiled_twice_runs_once(
        self, checked: Check, prompt: PromptDict, seeds: Any, pytestconfig: pytest.Config
    ) -> None:
        once = check_control(checked, controlled(prompt, "net"))
        prompt["sample"]["inputs"]["seed"] = next(seeds)
        plain = controlled(prompt, "net")
        twice = checked(plain, compiled_twice(plain, checked.backend), forwards=BOTH)
        if not pytestconfig.getoption("--on-cuda"):  # replays run no regions
            assert twice.rise["region_calls"] == once.rise["region_calls"]

    def test_the_original_is_unchanged_in_other_samplers_of_the_graph(self, checked: Check, prompt: PromptDict) -> None:
        """Three samplers in a row: stock, everything compiled, stock again."""
        plain = controlled(prompt, "net")
        for number in (2, 3):
            before = "sample" if number == 2 else "sample-2"
            inputs = {**plain["sample"]["inputs"], "latent_image": [before, 0], "denoise": 0.7}
            plain[f"sample-{number}"] = node("KSampler", **inputs)
            saved = {"samples": [f"sample-{number}", 0], "filename_prefix": "again"}
            plain[f"samples-{number}"] = node("ResoluteTestSaveLatent", **saved)
        ours = copy.deepcopy(plain)
        ours["compiled"] = node("ResoluteCompileModel", model=["model", 0], backend=checked.backend)
        ours["compiled-net"] = node("ResoluteCompileControlNet", control_net=["net", 0], backend=checked.backend)
        ours["apply-2"] = copy.deepcopy(plain["apply-0"])
        ours["apply-2"]["inputs"]["control_net"] = ["compiled-net", 0]
        ours["sample-2"]["inputs"].update(model=["compiled", 0], positive=["apply-2", 0], negative=["apply-2", 1])
        assert len(checked(plain, ours, forwards=BOTH).latents) == 3


class TestConditions:
    @pytest.mark.parametrize("side", ["positive", "negative"])
    def test_with_it_on_one_side_the_sides_run_separately(self, checked: Check, prompt: PromptDict, side: str) -> None:
        run = check_control(checked, controlled(prompt, "net", on=(side,)), 2 * STEPS + STEPS)
        for fewer in (prompt, controlled(prompt, "net")):
            assert_different(run, checked.bench.run(fewer))

    def test_the_older_node_gives_it_to_both_sides(self, checked: Check, prompt: PromptDict) -> None:
        plain = controlled(prompt, "net")
        both = plain["apply-0"]["inputs"]
        inputs = {
            "conditioning": ["positive", 0],
            **{name: both[name] for name in ("control_net", "image", "strength")},
        }
        plain["apply-0"] = node("ControlNetApply", **inputs)
        plain["sample"]["inputs"]["negative"] = ["negative", 0]
        assert_different(check_control(checked, plain), checked.bench.run(prompt))

    @pytest.mark.parametrize("merged_steps", [0, 2])
    def test_both_sides_run_separately_when_memory_is_short(
        self, checked: Check, prompt: PromptDict, merged_steps: int
    ) -> None:
        short = controlled(prompt, "net")
        short["short"] = node("ResoluteTestFreeMemory", model=["model", 0], from_step=merged_steps)
        short["sample"]["inputs"]["model"] = ["short", 0]
        apart = STEPS - merged_steps
        run = check_control(checked, short, 2 * merged_steps + 4 * apart)
        assert_different(run, checked.bench.run(prompt))

    def test_without_guidance_the_positive_side_runs_alone(self, checked: Check, prompt: PromptDict) -> None:
        prompt["sample"]["inputs"]["cfg"] = 1.0
        assert_different(check_control(checked, controlled(prompt, "net")), checked.bench.run(prompt))

    @pytest.mark.parametrize("tokens", [154, 231])
    def test_a_longer_prompt_compiles_nothing(self, checked: Check, prompt: PromptDict, tokens: int) -> None:
        for side in ("positive", "negative"):
            prompt[side]["inputs"]["tokens"] = tokens
        check_control(checked, controlled(prompt, "net"))


class TestSeveral:
    def test_two_in_a_row_add_up(self, checked: Check, prompt: PromptDict) -> None:
        run = check_control(checked, controlled(prompt, "net", "other"), 3 * STEPS)
        for fewer in ("net", "other"):
            assert_different(run, checked.bench.run(controlled(prompt, fewer)))

    def test_the_same_one_twice_counts_twice(self, checked: Check, prompt: PromptDict) -> None:
        run = check_control(checked, controlled(prompt, "net", "net"), 3 * STEPS)
        assert_different(run, checked.bench.run(controlled(prompt, "net")))

    @pytest.mark.parametrize("order", [("net", "other"), ("other", "net")], ids=["first", "second"])
    def test_one_next_to_another_that_is_not_compiled(
        self, checked: Check, prompt: PromptDict, order: tuple[str, str]
    ) -> None:
        plain = controlled(prompt, *order)
        ours = with_compiled_nets(compiled(plain, checked.backend), checked.backend, but=("other",))
        checked(plain, ours, forwards=BOTH)

    @pytest.mark.parametrize("place", ["apply-0", "apply-1"])
    def test_its_own_original_in_the_same_chain_runs_compiled_too_and_alone_it_does_not(
        self, checked: Check, prompt: PromptDict, seeds: Any, place: str
    ) -> None:
        plain = controlled(prompt, "net", "net")
        ours = compiled(plain, checked.backend)
        ours["compiled-net"] = node("ResoluteCompileControlNet", control_net=["net", 0], backend=checked.backend)
        ours[place]["inputs"]["control_net"] = ["compiled-net", 0]
        for _ in range(2):
            plain["sample"]["inputs"]["seed"] = ours["sample"]["inputs"]["seed"] = next(seeds)
            checked(plain, ours, forwards=3 * STEPS)
        prompt["sample"]["inputs"]["seed"] = next(seeds)
        checked(controlled(prompt, "net"), forwards=STEPS)

    def test_two_alternate_within_a_run(self, checked: Check, prompt: PromptDict) -> None:
        plain = controlled(prompt, "net", "other")
        plain["apply-0"]["inputs"]["end_percent"] = 0.5
        plain["apply-1"]["inputs"]["start_percent"] = 0.5
        run = check_control(checked, plain, STEPS + 2 + 2)
        for whole in ("net", "other"):
            assert_different(run, checked.bench.run(controlled(prompt, whole)))


class TestShapes:
    @pytest.mark.grid(2)
    @pytest.mark.parametrize(("width", "height"), [(72, 200), (264, 136), (64, 64)])
    def test_any_size_compiles_nothing(
        self, checked: Check, tiny_prompt: Any, seed: int, width: int, height: int
    ) -> None:
        whole = tiny_prompt(seed=seed, width=width, height=height, steps=STEPS)
        assert_different(check_control(checked, controlled(whole, "net"), BOTH + 1), checked.bench.run(whole))

    @pytest.mark.grid(2)
    @pytest.mark.parametrize(("batch", "pictures"), [(2, 1), (2, 2), (3, 2), (3, 4)])
    def test_any_batch_of_latents_and_pictures_compiles_nothing(
        self, checked: Check, tiny_prompt: Any, seed: int, batch: int, pictures: int
    ) -> None:
        whole = without_decoder(tiny_prompt(seed=seed, width=136, height=104, batch=batch, steps=STEPS))
        run = check_control(checked, controlled(whole, "net", picture=hint(batch=pictures)))
        assert run.latents[0].shape == (batch, 4, 13, 17)

    @pytest.mark.parametrize(("width", "height"), [(131, 97), (1, 1), (7, 300)])
    def test_a_picture_of_any_size_is_scaled_as_core_does(
        self, checked: Check, prompt: PromptDict, width: int, height: int
    ) -> None:
        run = check_control(checked, controlled(prompt, "net", picture=hint(width=width, height=height)))
        assert_different(run, checked.bench.run(controlled(prompt, "net")))

    def test_a_picture_with_an_alpha_channel_gives_the_error_that_core_gives(
        self, checked: Check, prompt: PromptDict
    ) -> None:
        plain = controlled(prompt, "net", picture=hint(channels=4))
        assert_cores_error(checked, plain, "to have 3 channels, but got 4")
        check_control(checked, controlled(prompt, "net"))
