"""The two passes of DeepCache on ComfyUI's own UNetModel, against a plain loop over its blocks; compiled and not."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ..in_process import HIGHEST_DEPTH, TOLERANCE, inputs, make_unet, relative_error, residuals

pytestmark = pytest.mark.usefixtures("inference")

SIZES = [(720, 720), (720, 960), (960, 720), (728, 720), (544, 512), (576, 544), (528, 528), (264, 200)]
DEPTHS = range(1, HIGHEST_DEPTH + 1)
Passes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # full pass, its feature, fast pass


@pytest.fixture(scope="module")
def unet(core: SimpleNamespace) -> Any:
    return make_unet(core)


@pytest.fixture(scope="module")
def plain(core: SimpleNamespace, unet: Any) -> Any:
    """What stands for `_forward` without Compile Model."""
    return core.ours("patch.step_pass").UncompiledForward(unet, unet._forward)


@pytest.fixture(scope="module")
def compiled(core: SimpleNamespace, unet: Any) -> Any:
    """What stands there with it."""
    request = core.ours("process.compile_request").CompileRequest.resolved("inductor", "cpu", core.roles.UNET)
    return core.ours("patch.compiled_forward").CompiledForward(unet, unet._forward, request)


@pytest.fixture
def both(core: SimpleNamespace) -> Callable[..., Passes]:
    """`both(forward, depth, first, second)`: a full pass over the first call and a fast one over the second."""
    passes, option = core.ours("deepcache.passes"), core.ours("comfyui.transformer_options").STEP_PASS

    def run(forward: Any, depth: int, first: dict[str, Any], second: dict[str, Any], patches: Any = None) -> Passes:
        kept: list[torch.Tensor] = []
        counted: Counter[str] = Counter()

        def call(arguments: dict[str, Any], chosen: Any) -> torch.Tensor:
            options = {"patches": {} if patches is None else patches, option: chosen}
            return forward(**arguments, transformer_options=options)

        full = call(first, passes.Full(depth, kept.append, counted))
        feature = kept[0].clone()
        fast = call(second, passes.Fast(depth, kept[0], counted))
        assert counted == {"full": 1, "fast": 1}
        assert torch.equal(kept[0], feature), "the fast pass wrote into the feature that later steps need"
        return full, feature, fast

    return run


@pytest.fixture
def expected(core: SimpleNamespace) -> Callable[..., Passes]:
    """The same from the plain loop."""

    def run(unet: Any, depth: int, first: dict[str, Any], second: dict[str, Any]) -> Passes:
        full, entered = core.reference.full(unet, **first)
        feature = entered[-(depth + 1)]
        return full, feature, core.reference.fast(unet, depth, feature, **second)

    return run


def assert_close(actual: Passes, expected: Passes) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        assert relative_error(mine, theirs) <= TOLERANCE


@pytest.mark.grid(1)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_both_passes_are_the_plain_loop_at_every_depth(
    core: SimpleNamespace, both: Any, unet: Any, plain: Any, compiled: Any, size: tuple[int, int]
) -> None:
    first, second = inputs(*size, seed=1), inputs(*size, seed=2)
    full, entered = core.reference.full(unet, **first)
    for depth in DEPTHS:
        feature = entered[-(depth + 1)]
        reference = (full, feature, core.reference.fast(unet, depth, feature, **second))
        assert_close(both(plain, depth, first, second), reference)
        assert_close(both(compiled, depth, first, second), reference)


@pytest.mark.parametrize("sizes", [SIZES[4:], pytest.param(SIZES, marks=pytest.mark.long)], ids=["four", "all"])
def test_sizes_in_every_order_compile_nothing_and_stay_right(
    core: SimpleNamespace, both: Any, compiled: Any, unet: Any, sizes: list[tuple[int, int]]
) -> None:
    calls = {size: (inputs(*size, seed=1), inputs(*size, seed=2)) for size in sizes}
    reference = {size: both(compiled, 2, *calls[size]) for size in sizes}  # equal to the plain loop: the test above
    stats = core.ours("process.runtime").cache().stats
    before = stats.snapshot()
    walk = every_ordered_pair(sizes)
    for size in walk:
        assert_close(both(compiled, 2, *calls[size]), reference[size])
    after = stats.snapshot()
    assert after["region_compiles"] == before["region_compiles"]
    assert after["graph_calls"] - before["graph_calls"] == 2 * len(walk)
    assert after["region_calls"] > before["region_calls"]
    assert (after["bypasses"], after["eager_calls"]) == (before["bypasses"], before["eager_calls"])


def every_ordered_pair(sizes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The shortest walk in which each size follows each other one: every edge of a complete graph, once."""
    left = {size: [other for other in sizes if other != size] for size in sizes}
    walk, trail = [], [sizes[0]]
    while trail:
        if left[trail[-1]]:
            trail.append(left[trail[-1]].pop())
        else:
            walk.append(trail.pop())
    assert set(itertools.pairwise(walk)) == set(itertools.permutations(sizes, 2))
    return walk


def test_the_full_pass_is_cores_own_to_the_last_bit(both: Any, unet: Any, plain: Any) -> None:
    call = inputs(264, 200)
    for depth in DEPTHS:
        assert torch.equal(both(plain, depth, call, call)[0], unet._forward(**call, transformer_options={}))


def test_a_fast_pass_over_the_same_call_is_the_full_one(both: Any, plain: Any) -> None:
    call = inputs(264, 200)
    for depth in DEPTHS:
        full, _, fast = both(plain, depth, call, call)
        assert torch.equal(fast, full)


@pytest.mark.parametrize("shorten", [0, 1, 4], ids=["all", "without the first", "two only"])
def test_each_block_takes_its_own_residual_of_a_controlnet(
    both: Any, expected: Any, unet: Any, plain: Any, compiled: Any, shorten: int
) -> None:
    control = residuals(unet, 264, 200)
    control["output"] = control["output"][shorten:]  # lists of other lengths stay aligned at their ends
    control["input"] = [torch.ones_like(part) for part in residuals(unet, 264, 200, seed=9)["output"]][::-1]
    control["output"][-1] = None
    kept = {name: list(found) for name, found in control.items()}

    def call(seed: int) -> dict[str, Any]:
        return {**inputs(264, 200, seed=seed), "control": {name: list(found) for name, found in control.items()}}

    for depth in DEPTHS:
        reference = expected(unet, depth, call(1), call(2))
        assert torch.equal(both(plain, depth, call(1), call(2))[0], unet._forward(**call(1), transformer_options={}))
        for forward in (plain, compiled):
            assert_close(both(forward, depth, call(1), call(2)), reference)
        handed_over = call(2)
        both(plain, depth, call(1), handed_over)
        assert handed_over["control"] == kept, "the fast pass took residuals out of its caller's lists"


def test_residuals_of_blocks_that_do_not_run_are_no_part_of_a_fast_call(core: SimpleNamespace, unet: Any) -> None:
    control = residuals(unet, 264, 200)
    shallow = core.ours("deepcache.passes").shallow_control(control, len(unet.output_blocks), 1)
    assert [len(shallow[name]) for name in ("input", "output")] == [0, 2]
    assert "middle" not in shallow
    assert [part is control["output"][at] for at, part in enumerate(shallow["output"])] == [True, True]


def test_class_conditional_models_take_their_vector(core: SimpleNamespace, both: Any, expected: Any) -> None:
    unet = make_unet(core, num_classes="sequential", adm_in_channels=24)
    forward = core.ours("patch.step_pass").UncompiledForward(unet, unet._forward)
    calls = [{**inputs(264, 200, seed=seed), "y": torch.full((1, 24), 0.1 * seed)} for seed in (1, 2)]
    for depth in DEPTHS:
        assert_close(both(forward, depth, *calls), expected(unet, depth, *calls))


def test_a_video_model_takes_its_frames(core: SimpleNamespace, both: Any, expected: Any) -> None:
    # As in SVD: time attention with a context of its own, residual blocks over frames, and which frames are pictures.
    unet = make_unet(
        core, use_temporal_attention=True, use_temporal_resblock=True, merge_strategy="learned_with_images",
        video_kernel_size=[3, 1, 1], extra_ff_mix_layer=True, use_spatial_context=True,
    )  # fmt: skip
    forward = core.ours("patch.step_pass").UncompiledForward(unet, unet._forward)
    frames = {"num_video_frames": 3, "image_only_indicator": torch.zeros(1, 3)}
    calls = [{**inputs(264, 200, seed=seed, batch=3), **frames} for seed in (1, 2)]
    for depth in (1, 3):
        assert torch.equal(both(forward, depth, *calls)[0], unet._forward(**calls[0], transformer_options={}))
        assert_close(both(forward, depth, *calls), expected(unet, depth, *calls))


class TestPatchesOfOtherPacks:
    """Core calls them with the block that they are about; a fast pass calls those whose block runs."""

    @staticmethod
    def recording(kinds: list[str]) -> tuple[dict[str, Any], list[Any]]:
        seen: list[Any] = []

        def block(*arguments: Any) -> Any:
            options = arguments[-1]
            seen.append((options["block"], options["transformer_index"]))
            for h in arguments[:-1]:
                h[:, ::2] *= 1.3  # in place and half of the channels, as FreeU does
            return arguments[0] if len(arguments) == 2 else arguments[:-1]

        def embedding(emb: torch.Tensor, channels: int, options: Any) -> torch.Tensor:
            return emb * 1.1

        patches = {kind: [embedding if kind == "emb_patch" else block] for kind in kinds}
        return patches, seen

    def test_they_run_where_their_block_runs_with_cores_own_numbers(self, both: Any, unet: Any, plain: Any) -> None:
        patches, seen = self.recording(["input_block_patch", "output_block_patch"])
        both(plain, 2, inputs(264, 200, 1), inputs(264, 200, 2), patches)
        of_the_full_pass, of_the_fast_pass = seen[:12], seen[12:]
        shallow = [("input", 0), ("input", 1), ("input", 2), ("output", 3), ("output", 4), ("output", 5)]
        assert of_the_fast_pass == [entry for entry in of_the_full_pass if entry[0] in shallow]

    def test_what_they_change_is_changed_in_both_passes(self, both: Any, unet: Any, plain: Any) -> None:
        call = inputs(264, 200, 1)
        for kind in ("input_block_patch", "input_block_patch_after_skip", "output_block_patch", "emb_patch"):
            patches, _ = self.recording([kind])
            own = unet._forward(**call, transformer_options={"patches": copy.copy(patches)})
            assert relative_error(own, unet._forward(**call, transformer_options={})) > 0.01
            full, _, fast = both(plain, 3, call, call, patches)
            assert torch.equal(full, own)
            # From the same call's feature the rest is the same, unless a patch acted on what is kept twice or never.
            assert relative_error(fast, own) <= TOLERANCE

    def test_they_forbid_a_capture_and_our_own_tap_does_not(self, core: SimpleNamespace, compiled: Any) -> None:
        passes, names = core.ours("deepcache.passes"), core.ours("comfyui.transformer_options")
        for chosen in (passes.Full(2, None, Counter()), passes.Fast(2, torch.zeros(1), Counter())):
            blockers = []
            for patches in ({}, {"output_block_patch": [print]}):
                options = {"patches": patches, names.STEP_PASS: chosen, names.STEP_CACHE_RUN: object()}
                given = compiled.by_name((), {**inputs(264, 200), "transformer_options": options})
                blockers.append(compiled.describe_pass(given, chosen)[0].policy.reason)
            assert blockers[0] is None
            assert "output_block_patch" in str(blockers[1])


class TestGraphs:
    """Compiled, each pass is a graph of its own over the same regions."""

    @pytest.fixture
    def keys(self, core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        seen: list[Any] = []
        cache = core.ours("process.runtime").cache()
        run = cache.run

        def watched(program: Any, call: Any, *recheck: Any) -> Any:
            seen.append((program, call))
            return run(program, call, *recheck)

        monkeypatch.setattr(cache, "run", watched)
        return seen

    def test_each_pass_has_its_role_and_key_and_both_run_one_program(
        self, both: Any, compiled: Any, keys: list[Any]
    ) -> None:
        call = inputs(264, 200)
        compiled(**call, transformer_options={})
        both(compiled, 2, call, call)
        both(compiled, 3, call, call)
        assert [entry[1].key.role.value for entry in keys] == ["unet", *["deepcache_full", "deepcache_fast"] * 2]
        assert len({entry[1].key for entry in keys}) == 5
        assert len({id(entry[0]) for entry in keys}) == 1
        assert {entry[1].key.signature.latent_shape for entry in keys} == {(1, 4, 25, 33)}

    def test_the_feature_is_an_input_of_the_fast_graph(self, both: Any, compiled: Any, keys: list[Any]) -> None:
        call = inputs(264, 200)
        _, feature, _ = both(compiled, 2, call, call)
        signature = keys[-1][1].key.signature
        assert dict(signature.tensors)["feature"].shape == tuple(feature.shape)
        assert "feature" not in dict(keys[0][1].key.signature.tensors)

    def test_a_call_can_be_repeated_with_other_tensors_in_place(
        self, both: Any, compiled: Any, keys: list[Any]
    ) -> None:
        # What a capture does: it calls `invoke` again, with its own buffers.
        control = residuals(compiled.module, 264, 200)
        first, second = ({**inputs(264, 200, seed), "control": control} for seed in (1, 2))
        full, feature, fast = both(compiled, 2, copy.copy(first), copy.copy(second))
        for entry, results in zip(keys, [(full, feature), fast], strict=True):
            call = entry[1]
            again = call.invoke([tensor.clone() for tensor in call.tensors])
            torch.testing.assert_close(again, results, rtol=1e-4, atol=1e-4)


def test_around_the_forward_of_another_pack_a_decision_is_left_to_whoever_stands_inside(
    core: SimpleNamespace, unet: Any
) -> None:
    passes = core.ours("deepcache.passes")
    counted: Counter[str] = Counter()
    forward = core.ours("patch.step_pass").UncompiledForward(unet, lambda x, *args, **kwargs: x * 3)
    call = inputs(264, 200)
    options = {core.ours("comfyui.transformer_options").STEP_PASS: passes.Fast(2, torch.zeros(1), counted)}
    assert torch.equal(forward(**call, transformer_options=options), call["x"] * 3)
    assert not counted


def test_the_share_of_a_fast_pass_grows_with_depth_up_to_the_whole(core: SimpleNamespace) -> None:
    unet = make_unet(core, channel_mult=[1, 2, 4])
    shares = [core.ours("deepcache.node").share_of_fast_pass(unet, depth) for depth in DEPTHS]
    assert shares == sorted(shares)
    assert 0.05 < shares[0] < 0.3
    assert 0.7 < shares[-1] < 1.0
