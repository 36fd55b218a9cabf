"""DeepCache through ComfyUI's own samplers, in this process, against a plain loop that is driven by the same steps."""

from __future__ import annotations

import gc
import itertools
import logging
import re
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..in_process import TOLERANCE, relative_error

pytestmark = pytest.mark.usefixtures("inference")

STEPS = 12
EVERY_THIRD = list(range(0, STEPS, 3))
HEIGHT, WIDTH = 13, 17  # of the latent: odd, and odd again when halved and rounded up


@pytest.fixture(scope="module")
def model(core: SimpleNamespace) -> Any:
    """A tiny UNet of the SD1.5 family: six input and six output blocks."""
    with torch.inference_mode():
        return core.tiny_model().build(0, "sd")[0]


def condition(seed: int, tokens: int = 77, **more: Any) -> list[Any]:
    return [torch.randn((1, tokens, 768), generator=torch.Generator().manual_seed(seed)), more]


def batched(core: SimpleNamespace, patcher: Any, policy: str) -> None:
    """Let a model merge or split its conds, as Compile Model does."""
    kind, wrapper = core.comfy.patcher_extension.WrappersMP.CALC_COND_BATCH, core.ours("patch.wrappers")
    wrapper.set_wrapper(patcher, kind, "resolute-batching", wrapper.batching_wrapper(policy))


class Bench:
    """Samples with a model and says how many passes of each kind its DeepCache ran."""

    def __init__(self, core: SimpleNamespace, model: Any, caplog: pytest.LogCaptureFixture) -> None:
        self.core, self.model, self.caplog = core, model, caplog
        caplog.set_level(logging.INFO)

    def cached(self, model: Any = None, **settings: Any) -> Any:
        """The model with DeepCache."""
        chosen = self.core.ours("deepcache.schedule").Settings(**settings)
        return self.core.ours("deepcache.node").add_deepcache(self.model if model is None else model, chosen)

    def compiled(self, model: Any = None, backend: str = "eager", policy: str = "auto") -> Any:
        """The model with Compile Model, on a backend that runs ComfyUI's own code: what differs would be ours."""
        compile_model = self.core.ours("patch.diffusion_model").compile_diffusion_model
        return compile_model(self.model if model is None else model, backend, None, policy)

    def driven(self, full_steps: list[int], depth: int = 2, policy: str = "auto") -> tuple[Any, Any]:
        """The model with the plain loop in the place of its forward, and the loop."""
        clone = self.model.clone()
        driver = self.core.reference.Driver(clone.get_model_object("diffusion_model"), depth, full_steps)
        clone.add_object_patch("diffusion_model._forward", driver)
        batched(self.core, clone, policy)
        return clone, driver

    def sample(self, model: Any, **changes: Any) -> torch.Tensor:
        """Latents (batch, 4, height, width); `changes` are arguments of ComfyUI's `sample`, or batch, height, width."""
        shape = (changes.pop("batch", 1), 4, changes.pop("height", HEIGHT), changes.pop("width", WIDTH))
        latent = changes.pop("latent_image", torch.zeros(shape))
        given = {
            "steps": STEPS, "cfg": 4.0, "sampler_name": "euler", "scheduler": "normal", "seed": 5,
            "positive": [condition(1)], "negative": [condition(2)], **changes,
        }  # fmt: skip
        noise = self.core.comfy.sample.prepare_noise(latent, given["seed"])
        self.caplog.clear()
        return self.core.comfy.sample.sample(model, noise, latent_image=latent, disable_pbar=True, **given)

    @property
    def passes(self) -> tuple[int, int]:
        """Full and fast passes of the last run, as it says itself."""
        counted = re.findall(r"; (\d+) full and (\d+) fast passes", self.caplog.text)
        assert len(counted) == 1, self.caplog.text
        return int(counted[0][0]), int(counted[0][1])


@pytest.fixture
def bench(core: SimpleNamespace, model: Any, caplog: pytest.LogCaptureFixture) -> Bench:
    return Bench(core, model, caplog)


PARTS = {
    "one batch": {},
    "without guidance": {"cfg": 1.0},
    "several conditions": {"positive": [condition(1), condition(3, 154), condition(4, 80)]},
    "areas": {
        "positive": [condition(1, area=(8, 8, 0, 0), strength=1.0), condition(3, area=(13, 9, 0, 8), strength=0.7)]
    },
    "one condition twice": {"positive": [condition(1), condition(1)]},
    "a condition that leaves": {"positive": [condition(1), condition(3, start_percent=0.0, end_percent=0.4)]},
    "a condition that comes": {"positive": [condition(1), condition(3, 80, start_percent=0.3, end_percent=1.0)]},
    "a mask": {"positive": [condition(1), condition(3, mask=torch.ones(1, HEIGHT, WIDTH) * 0.5)]},
    "a batch of three": {"batch": 3},
    "euler ancestral": {"sampler_name": "euler_ancestral"},
    "heun": {"sampler_name": "heun"},
    "heun that looks two steps ahead": {"sampler_name": "heunpp2"},
    "dpm 2": {"sampler_name": "dpm_2"},
    "dpm++ 2s": {"sampler_name": "dpmpp_2s_ancestral"},
    "dpm++ 2m": {"sampler_name": "dpmpp_2m", "scheduler": "karras"},
    "dpm++ sde": {"sampler_name": "dpmpp_sde"},
    "uni pc": {"sampler_name": "uni_pc"},
    "lcm": {"sampler_name": "lcm", "scheduler": "sgm_uniform", "cfg": 1.5},
    "dpm adaptive": {"sampler_name": "dpm_adaptive", "scheduler": "karras"},
    "image to image": {"latent_image": torch.full((1, 4, HEIGHT, WIDTH), 0.3), "denoise": 0.5},
    "a noise mask": {"noise_mask": torch.eye(HEIGHT, WIDTH)[None], "latent_image": torch.ones(1, 4, HEIGHT, WIDTH)},
    "the middle of a schedule": {"start_step": 1, "last_step": 11, "steps": 13},
}


# One after the other too: where it matters how often the model is called, and for which conditions.
SPLIT_TOO = ("one batch", "several conditions", "areas", "a condition that leaves", "heun", "dpm 2", "image to image")
CASES = [(kind, "merge", "before") for kind in PARTS] + [(kind, "split", "after") for kind in SPLIT_TOO]


@pytest.mark.grid(5)
@pytest.mark.parametrize(("kind", "policy", "place"), CASES)
def test_it_is_the_plain_loop_and_the_same_with_compile_model(bench: Bench, kind: str, policy: str, place: str) -> None:
    changes, policy = PARTS[kind], f"always {policy}"
    steps = 10 if "last_step" in changes else STEPS
    reference, driver = bench.driven(list(range(0, steps, 3)), policy=policy)
    expected = bench.sample(reference, **changes)
    assert torch.isfinite(expected).all() and expected.std() > 0
    deepcache = bench.cached()
    batched(bench.core, deepcache, policy)
    alone = bench.sample(deepcache, **changes)
    assert relative_error(alone, expected) <= TOLERANCE
    passes = bench.passes
    assert passes[1] > 0
    assert passes == (driver.calls["full"], driver.calls["fast"])
    if place == "before":
        compiled = bench.compiled(bench.cached(), policy=policy)
    else:
        compiled = bench.cached(bench.compiled(policy=policy))
    assert torch.equal(bench.sample(compiled, **changes), alone)
    assert bench.passes == passes


@pytest.mark.grid(3)
@pytest.mark.parametrize("depth", [1, 3, 5])
@pytest.mark.parametrize("interval", [2, 5])
def test_every_depth_and_interval_is_the_plain_loop(bench: Bench, depth: int, interval: int) -> None:
    reference, _ = bench.driven(list(range(0, STEPS, interval)), depth)
    expected = bench.sample(reference)
    assert relative_error(bench.sample(bench.cached(depth=depth, interval=interval)), expected) <= TOLERANCE


def test_a_sampler_of_one_prediction_a_step_is_the_same_counted_and_read(
    bench: Bench, core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, run = core.ours("deepcache.node"), core.ours("deepcache.run")
    assert len(node._ONE_PREDICTION) == 9
    read: list[float] = []
    sigma_of = run.DeepCacheRun._sigma
    monkeypatch.setattr(run.DeepCacheRun, "_sigma", lambda self, sigmas: read.append(0.0) or sigma_of(self, sigmas))
    known = node._ONE_PREDICTION
    for name in sorted(known):
        sampler = {"sampler_name": name.removeprefix("sample_"), "scheduler": "karras", "cfg": 1.5}
        counted, passes = bench.sample(bench.cached(), **sampler), bench.passes
        assert read == [], name  # so nothing waited for the GPU
        assert passes == (4, 8), name
        monkeypatch.setattr(node, "_ONE_PREDICTION", frozenset())
        assert torch.equal(bench.sample(bench.cached(), **sampler), counted), name
        assert bench.passes == passes, name
        assert len(read) == STEPS, name
        read.clear()
        monkeypatch.setattr(node, "_ONE_PREDICTION", known)


ATEN = torch.ops.aten
READING = (ATEN.item.default, ATEN.is_nonzero.default, ATEN._local_scalar_dense.default, ATEN.nonzero.default)


class Reads(TorchDispatchMode):
    """Counts the values that Python reads from a tensor. On a GPU each such read waits for all that it has to do."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in READING
        return function(*args, **(kwargs or {}))


@pytest.mark.grid(3)
@pytest.mark.parametrize("kind", ["compiled", "with DeepCache"])
@pytest.mark.parametrize("sampler", ["euler", "ddim", "uni_pc"])
def test_with_a_sampler_that_reads_nothing_no_step_waits(bench: Bench, sampler: str, kind: str) -> None:
    model = bench.compiled()
    if kind == "with DeepCache":
        model = bench.cached(model)
    seen: list[int] = []
    with Reads() as reads:
        bench.sample(model, sampler_name=sampler, callback=lambda *_: seen.append(reads.count))
    between = {after - before for before, after in itertools.pairwise(seen)}
    # Several predictions of uni_pc belong to one step: DeepCache does not count them, it reads the noise level.
    expected = 1 if (sampler, kind) == ("uni_pc", "with DeepCache") else 0
    assert between == {expected}


def test_where_another_pack_wraps_predictions_noise_levels_are_read(bench: Bench) -> None:
    """It asks twice for each prediction, so counting would be wrong."""
    twice = bench.model.clone()

    def ask_twice(executor: Any, *args: Any, **kwargs: Any) -> Any:
        executor(*args, **kwargs)
        return executor(*args, **kwargs)

    twice.add_wrapper_with_key("predict_noise", "another pack", ask_twice)
    for model in (bench.cached(twice), bench.cached(bench.compiled(twice))):
        bench.sample(model)
        assert bench.passes == (8, 16)


def test_a_step_of_several_calls_does_not_count_twice(bench: Bench) -> None:
    # Split conditions: two calls a step, 12 steps, every third in full.
    bench.sample(bench.cached(bench.compiled(policy="always split")))
    assert bench.passes == (8, 16)
    # dpm_2 calls a second time in the middle of each step but the last.
    bench.sample(bench.cached(), sampler_name="dpm_2")
    full, fast = bench.passes
    assert (full, full + fast) == (8, 23)


def test_conditions_that_are_merged_in_one_step_and_split_in_the_next_keep_their_features(
    bench: Bench, core: SimpleNamespace
) -> None:
    def flipping(model: Any) -> Any:
        clone = model.clone()
        calls = iter(range(10**6))
        estimate = {0: -1e30, 1: 1e30}
        clone.add_object_patch("memory_required", lambda *_, **__: estimate[next(calls) % 5 // 2 % 2])
        return clone

    bench.sample(bench.cached(flipping(bench.model)))
    full, fast = bench.passes
    assert STEPS < full + fast < 2 * STEPS, "the conditions were always merged, or always split"
    assert full <= 2 * len(EVERY_THIRD), "a change of batching cost full passes"
    reference, _ = bench.driven(EVERY_THIRD)
    assert relative_error(bench.sample(bench.cached(flipping(bench.model))), bench.sample(reference)) <= TOLERANCE


class TestTheModelWithoutTheNode:
    @pytest.mark.parametrize(
        ("settings", "changes", "reason"),
        [
            ({"interval": 1}, {}, "interval is 1"),
            ({}, {"steps": 8}, "8 steps or fewer"),
            ({}, {"steps": 4, "sampler_name": "lcm", "cfg": 1.0}, "8 steps or fewer"),
            ({"start_percent": 0.999}, {}, "start and end percent"),
        ],
        ids=["interval 1", "eight steps", "four steps of lcm", "a window without steps"],
    )
    def test_where_nothing_is_skipped_it_is_the_same_to_the_last_bit_and_says_why(
        self, bench: Bench, settings: Any, changes: Any, reason: str
    ) -> None:
        expected = bench.sample(bench.model, **changes)
        assert torch.equal(bench.sample(bench.cached(**settings), **changes), expected)
        assert re.search(rf"DeepCache: \d+ steps, all full: {reason}", bench.caplog.text)

    def test_it_is_left_as_it_is(self, bench: Bench) -> None:
        before = bench.sample(bench.model)
        clone = bench.cached()
        different = bench.sample(clone)
        assert relative_error(different, before) > 1e-3, "DeepCache did nothing"
        assert torch.equal(bench.sample(bench.model), before)

    def test_outside_the_window_every_step_is_full(self, bench: Bench) -> None:
        # percent_to_sigma(0.5) lies between steps 5 and 6 of 12 "normal" ones.
        bench.sample(bench.cached(end_percent=0.5))
        early = bench.passes
        assert early == (8, 4)
        bench.sample(bench.cached(start_percent=0.5))
        assert bench.passes == (8, 4)


@pytest.mark.parametrize("kind", ["compiled", "DeepCache", "both"])
@pytest.mark.parametrize("moment", ["loaded", "sampling"])
def test_a_clone_that_is_collected_does_not_take_the_forward_of_another_along(
    bench: Bench, core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, moment: str, kind: str
) -> None:
    model = bench.model if kind == "DeepCache" else bench.compiled()
    model = model if kind == "compiled" else bench.cached(model)
    # As a prompt that failed leaves one behind, in the cycle of its traceback.
    garbage: list[Any] = [model.clone()]
    counters = core.ours("process.runtime").cache().stats.counters
    before = counters.eager_calls
    if moment == "loaded":
        load = core.comfy.sampler_helpers.prepare_sampling
        monkeypatch.setattr(
            core.comfy.sampler_helpers, "prepare_sampling", lambda *args, **kw: (load(*args, **kw), garbage.clear())[0]
        )
    bench.sample(model, callback=lambda step, *_: garbage.clear() if (moment, step) == ("sampling", 2) else None)
    assert not garbage
    if kind != "DeepCache":
        assert counters.eager_calls - before == STEPS
    if kind != "compiled":
        assert bench.passes == (4, 8)


class TestOneRunAfterAnother:
    def test_a_second_run_knows_nothing_of_the_first(self, bench: Bench) -> None:
        other = {"positive": [condition(9)], "negative": [condition(8, 154)], "batch": 2, "height": 9, "seed": 77}
        deepcache = bench.cached()
        first, second = bench.sample(deepcache), bench.sample(deepcache, **other)
        assert torch.equal(bench.sample(deepcache), first)
        assert torch.equal(bench.sample(bench.cached(), **other), second)

    def test_a_latent_that_is_enlarged_and_sampled_again(self, bench: Bench) -> None:
        def both(model: Any) -> torch.Tensor:
            small = bench.sample(model)
            large = torch.nn.functional.interpolate(small, size=(19, 25), mode="nearest")
            return bench.sample(model, latent_image=large, denoise=0.6)

        reference, _ = bench.driven(EVERY_THIRD)
        assert relative_error(both(bench.cached()), both(reference)) <= TOLERANCE

    @pytest.mark.parametrize("step", [0, 2, 3, 7])
    def test_a_run_that_breaks_off_leaves_nothing_behind(self, bench: Bench, step: int) -> None:
        deepcache = bench.cached()
        expected = bench.sample(deepcache)
        broken, runs = deepcache.clone(), []

        def call(apply_model: Any, given: dict[str, Any]) -> Any:
            runs.append(weakref.ref(given["c"]["transformer_options"]["resolute_step_cache"]))
            if len(runs) > step:
                raise KeyboardInterrupt
            return apply_model(given["input"], given["timestep"], **given["c"])

        broken.set_model_unet_function_wrapper(call)
        with pytest.raises(KeyboardInterrupt) as caught:
            bench.sample(broken, seed=6)
        # Whoever keeps the error for a report keeps its frames, and the run with them; not the features.
        assert runs[0]() is None or not runs[0]()._features
        del caught
        gc.collect()
        assert runs[0]() is None, "the run is still alive"
        assert torch.equal(bench.sample(deepcache), expected)

    def test_features_end_with_the_run_that_made_them(self, bench: Bench) -> None:
        bench.sample(bench.cached())
        gc.collect()
        feature = bench.core.ours("deepcache.run").Feature
        kept = [thing for thing in gc.get_objects() if type(thing) is feature]
        assert kept == []


def guided(bench: Bench, calls: int) -> Callable[[Any], Any]:
    """A guidance that calls the model again for each condition, as perturbed and self-attention guidance do."""
    core = bench.core

    def patch(model: Any) -> Any:
        def post_cfg(arguments: dict[str, Any]) -> Any:
            result = arguments["denoised"]
            for number in range(calls):
                x = arguments["input"] * (1.0 + 0.3 * number)  # the same condition, another latent
                found = core.comfy.samplers.calc_cond_batch(
                    arguments["model"], [arguments["cond"]], x, arguments["sigma"], arguments["model_options"]
                )
                result = result + 0.2 * (arguments["cond_denoised"] - found[0])
            return result

        clone = model.clone()
        clone.set_model_sampler_post_cfg_function(post_cfg)
        return clone

    return patch


class TestGuidanceThatCallsAgain:
    def test_each_call_for_one_condition_has_a_feature_of_its_own(self, bench: Bench) -> None:
        patch = guided(bench, calls=2)
        expected = self.by_hand(bench, patch)
        assert relative_error(bench.sample(patch(bench.cached())), expected) <= TOLERANCE
        assert bench.passes == (3 * len(EVERY_THIRD), 3 * (STEPS - len(EVERY_THIRD)))

    @staticmethod
    def by_hand(bench: Bench, patch: Callable[[Any], Any]) -> torch.Tensor:
        """The plain loop, which here keeps one feature for each of a step's three calls, in their order."""
        clone = bench.model.clone()
        unet = clone.get_model_object("diffusion_model")
        kept: dict[int, Any] = {}
        count = iter(range(10**6))

        def forward(x: Any, timesteps: Any, context: Any, y: Any, control: Any, options: Any) -> Any:
            step, which = divmod(next(count), 3)
            given = {"x": x, "timesteps": timesteps, "context": context, "transformer_options": options}
            if step in EVERY_THIRD:
                out, entered = bench.core.reference.full(unet, **given)
                kept[which] = entered[-3]
                return out
            return bench.core.reference.fast(unet, 2, kept[which], **given)

        clone.add_object_patch("diffusion_model._forward", forward)
        batched(bench.core, clone, "always merge")
        return bench.sample(patch(clone))

    def test_a_call_that_a_step_cache_leaves_out_is_not_mixed_up_with_another(self, bench: Bench) -> None:
        # Perturbed guidance repeats a condition with a block patched: told apart even where the first call is missing.
        run = bench.core.ours("deepcache.run").DeepCacheRun(plan_of(bench), 2, [3.0, 2.0, 1.0, 0.0])
        latent, sigma = torch.zeros(1, 4, 8, 8), torch.tensor([3.0])
        plain = {"uuids": ["a"], "cond_or_uncond": [0], "sigmas": sigma}
        patched = {**plain, "patches_replace": {"attn1": {("middle", 0): print}}}
        run.begin_evaluation()
        run.decide(latent, plain).finish((None, torch.ones(1)))
        run.decide(latent, patched).finish((None, torch.full((1,), 2.0)))
        run.begin_evaluation()
        assert run.decide(latent, {**patched, "sigmas": torch.tensor([2.0])}).feature == 2.0


def plan_of(bench: Bench) -> Any:
    return bench.core.ours("deepcache.schedule").Plan((None, 0, 0))


class TestDecisions:
    """One call at a time."""

    @pytest.fixture
    def decide(self, bench: Bench) -> Callable[..., Any]:
        run = bench.core.ours("deepcache.run").DeepCacheRun(plan_of(bench), 2, [3.0, 2.0, 1.0, 0.0])

        def decide(sigma: float | None, shape: tuple[int, ...] = (2, 4, 8, 8), **options: Any) -> Any:
            run.begin_evaluation()
            known = {"uuids": ["a", "b"], "cond_or_uncond": [0, 1], **options}
            return run.decide(torch.zeros(shape), {**known, "sigmas": None if sigma is None else torch.tensor([sigma])})

        return decide

    @staticmethod
    def kind(chosen: Any) -> str:
        return type(chosen).__name__

    def test_a_feature_serves_its_condition_alone_and_together(self, decide: Any) -> None:
        decide(3.0).finish((None, torch.tensor([1.0, 2.0])))
        assert decide(2.0).feature.tolist() == [1.0, 2.0]
        assert decide(2.0, (1, 4, 8, 8), uuids=["b"], cond_or_uncond=[1]).feature.tolist() == [2.0]
        assert decide(2.0, uuids=["b", "a"], cond_or_uncond=[1, 0]).feature.tolist() == [2.0, 1.0]

    @pytest.mark.parametrize(
        ("shape", "options"),
        [
            ((2, 4, 8, 8), {"uuids": ["a", "c"]}),
            ((2, 4, 8, 8), {"cond_or_uncond": [1, 0]}),
            ((2, 4, 8, 9), {}),
            ((4, 4, 8, 8), {}),
            ((2, 4, 8, 8), {"context_window": SimpleNamespace(index_list=[4, 5])}),
            ((2, 4, 8, 8), {"ad_params": {"sub_idxs": [4, 5]}}),
            ((2, 4, 8, 8), {"patches": {"attn1_patch": [print]}}),
            ((2, 4, 8, 8), {"uuids": None}),
        ],
        ids=["condition", "side", "size", "batch", "frames", "frames of a pack", "patches", "nothing known"],
    )
    def test_a_call_that_differs_has_none_and_runs_in_full(self, decide: Any, shape: Any, options: Any) -> None:
        decide(3.0).finish((None, torch.tensor([1.0, 2.0])))
        assert self.kind(decide(2.0, shape, **options)) == "Full"

    def test_a_call_without_a_noise_level_is_not_decided(self, decide: Any) -> None:
        assert decide(None) is None

    def test_a_batch_that_is_no_multiple_of_its_conditions_is_kept_whole(self, decide: Any) -> None:
        feature = torch.tensor([1.0, 2.0, 3.0])
        decide(3.0, (3, 4, 8, 8)).finish((None, feature))
        assert decide(2.0, (3, 4, 8, 8)).feature is feature

    def test_a_feature_of_another_full_step_does_not_do(self, bench: Bench) -> None:
        plan = bench.core.ours("deepcache.schedule").Plan((None, 0, None, 2))
        run = bench.core.ours("deepcache.run").DeepCacheRun(plan, 2, [4.0, 3.0, 2.0, 1.0, 0.0])
        options = {"uuids": ["a"], "cond_or_uncond": [0]}
        run.decide(torch.zeros(1, 4, 8, 8), {**options, "sigmas": torch.tensor([4.0])}).finish((None, torch.ones(1)))
        late = run.decide(torch.zeros(1, 4, 8, 8), {**options, "sigmas": torch.tensor([1.0])})
        assert self.kind(late) == "Full"
        assert late.keep is not None


class TestTheNode:
    @pytest.mark.parametrize("depth", [0, 6, 32])
    def test_a_depth_that_the_model_lacks_is_refused_with_the_range(self, bench: Bench, depth: int) -> None:
        with pytest.raises(Exception, match=f"depth {depth} is outside what this model has: choose 1 to 5"):
            bench.cached(depth=depth)

    def test_another_kind_of_model_is_told_what_to_use(self, bench: Bench) -> None:
        other = bench.model.clone()
        other.add_object_patch("diffusion_model", torch.nn.Linear(1, 1))
        with pytest.raises(Exception, match=r"DeepCache is for UNets .* this model is a Linear.* EasyCache"):
            bench.cached(other)

    def test_it_says_what_it_will_do(self, bench: Bench) -> None:
        bench.cached()
        assert re.search(r"DeepCache: for example 20 steps: 7 full, 13 fast, about 1\.\dx", bench.caplog.text)

    def test_of_two_nodes_the_last_decides(self, bench: Bench) -> None:
        expected = bench.sample(bench.cached(interval=2))
        assert torch.equal(bench.sample(bench.cached(bench.cached(interval=5), interval=2)), expected)
        assert bench.passes == (6, 6)

    def test_around_the_forward_of_another_pack_every_step_is_full_and_it_says_so(self, bench: Bench) -> None:
        other = bench.model.clone()
        own = other.get_model_object("diffusion_model._forward")
        other.add_object_patch("diffusion_model._forward", lambda *args, **kwargs: own(*args, **kwargs) * 1.01)
        expected = bench.sample(other)
        assert torch.equal(bench.sample(bench.cached(other)), expected)
        bench.caplog.clear()
        bench.cached(other)
        assert "another pack put a forward of its own into this model, so every step runs in full" in bench.caplog.text

    def test_a_pack_that_puts_its_forward_around_ours_keeps_both(self, bench: Bench) -> None:
        def louder(model: Any) -> Any:
            clone = model.clone()
            inner = clone.get_model_object("diffusion_model._forward")
            clone.add_object_patch("diffusion_model._forward", lambda *args, **kwargs: inner(*args, **kwargs) * 1.01)
            return clone

        expected = bench.sample(louder(bench.cached()))
        assert bench.passes == (4, 8)
        assert torch.equal(bench.sample(bench.compiled(louder(bench.cached()))), expected)
        assert bench.passes == (4, 8)

    def test_a_pack_that_never_calls_ours_is_named_at_the_end(self, bench: Bench) -> None:
        model = bench.cached()
        model.add_object_patch("diffusion_model._forward", lambda x, *args, **kwargs: x * 0.5)
        bench.sample(model)
        assert "none of its passes ran: another pack replaced or skipped the model's forward" in bench.caplog.text

    @pytest.mark.parametrize("place", ["before", "after"])
    def test_cores_own_compile_node_does_not_go_on_with_the_first_pass_it_saw(self, bench: Bench, place: str) -> None:
        # It drops guards on transformer_options, where the decision is: the graph of a full pass would serve them all.
        def core_compiled(model: Any) -> Any:
            clone = model.clone()
            bench.core.torch_compile(model=clone, backend="eager", options={"guard_filter_fn": unguarded})
            return clone

        def unguarded(guards: Any) -> list[bool]:
            return ["transformer_options" not in guard.name for guard in guards]

        expected = bench.sample(bench.cached())
        model = bench.cached(core_compiled(bench.model)) if place == "before" else core_compiled(bench.cached())
        assert relative_error(bench.sample(model), expected) <= TOLERANCE
        assert bench.passes == (4, 8)

    def test_it_does_not_keep_the_model_alive(self, core: SimpleNamespace, bench: Bench) -> None:
        model = core.tiny_model().build(1, "sd")[0]
        clone = bench.cached(model)
        bench.sample(clone)
        core.comfy.model_management.unload_all_models()
        alive = weakref.ref(clone.model.diffusion_model)
        del model, clone
        gc.collect()
        assert alive() is None
