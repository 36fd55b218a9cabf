"""What Warm Up passes to a model, and which of its tasks are ready. In this process."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compile_cache.cache.graph_cache import GraphCache
from compile_cache.call_policy import ANYTHING
from compile_cache.config import CacheConfig

from ..unit.fakes import BUDGET, MIB, OBSERVED, FakeProgram, Module

WIDTH = 16  # of an embedding


@pytest.mark.parametrize(("dimensions", "frames"), [(2, ()), (3, (1,))], ids=["pictures", "one frame of a video"])
def test_a_prediction_has_the_rank_of_the_models_latents(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, dimensions: int, frames: tuple[int, ...]
) -> None:
    (patcher,) = core.tiny_model().build(seed=0, kind="sd")
    shapes = []

    def network(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return torch.zeros_like(x)

    patcher.add_object_patch("diffusion_model.forward", network)
    monkeypatch.setattr(patcher.model.latent_format, "latent_dimensions", dimensions, raising=False)
    predict = core.ours("warm_up.predict")
    text = [[torch.zeros(1, 77, WIDTH), {}]]
    size = SimpleNamespace(width=128, height=64)
    predict.predict(patcher, SimpleNamespace(size=size, batch=2, chunks=None), 1.0, (text, text), None, None)
    assert shapes == [(2, 4, *frames, 8, 16)]


def test_a_decoder_of_videos_is_refused_with_a_sentence(core: SimpleNamespace) -> None:
    item = SimpleNamespace(size=SimpleNamespace(width=64, height=64), batch=1)
    with pytest.raises(Exception, match="only warm up VAEs of images") as caught:
        core.ours("warm_up.predict").decode(SimpleNamespace(latent_dim=3), item, 0, 0)
    assert type(caught.value).__name__ == "UserError"


def test_the_key_of_conditioning_has_the_shapes_and_values_beside_the_embedding(core: SimpleNamespace) -> None:
    key = core.ours("warm_up.run")._key_of

    def of(**more: Any) -> Any:
        text = [[torch.zeros(1, 77, WIDTH), more]]
        return key((text, text))

    assert of(latents=[torch.zeros(1, 4, 8, 8)]) == of(latents=[torch.ones(1, 4, 8, 8)])
    assert of(latents=[torch.zeros(1, 4, 8, 8)]) != of(latents=[torch.zeros(1, 4, 8, 9)])
    assert of(strength=0) != of(strength=None)
    assert of(area=(8, 8)) != of(mask=(8, 8))
    first, second = torch.nn.Identity(), torch.nn.Identity()
    assert of(hook=first) == of(hook=first) != of(hook=second)
    unhashable = {1}
    assert of(hook=unhashable) != of(hook=unhashable)


class TestReady:
    """A task whose captures are all there still is skipped. With a cache whose graphs are no GPU's."""

    @pytest.fixture
    def cache(self, core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> GraphCache:
        cache = GraphCache(CacheConfig(budget_bytes=BUDGET))
        monkeypatch.setattr(core.ours("process.runtime"), "cache", lambda: cache)
        return cache

    @pytest.fixture
    def warm_up(self, core: SimpleNamespace, cache: GraphCache) -> Callable[..., tuple[str, int]]:
        """Runs these calls as one task. Returns its state and the bytes of its captures."""
        run, owner = core.ours("warm_up.run"), torch.nn.Identity()
        program = FakeProgram(size=MIB)

        def warm_up(*calls: Any) -> tuple[str, int]:
            def work() -> None:
                for call in calls:
                    cache.run(program, call)

            outcome = run._run_task(run.Task("model", "64x64", owner, (), work))
            return outcome.state, outcome.bytes

        return warm_up

    def test_it_is_until_one_of_its_captures_goes(self, cache: GraphCache, warm_up: Any) -> None:
        module = Module()
        calls = (module.call(16), module.call(24, policy=ANYTHING.run_once(OBSERVED)), module.call(32))
        assert [warm_up(*calls) for _ in range(2)] == [("warmed", 2 * MIB), ("ready", 2 * MIB)]
        cache.trim(MIB)
        assert [warm_up(*calls) for _ in range(2)] == [("warmed", 2 * MIB), ("ready", 2 * MIB)]

    def test_captures_that_others_made_are_not_its_own(self, cache: GraphCache, warm_up: Any) -> None:
        module = Module()
        cache.run(FakeProgram(owner=2), Module().call(8))
        assert warm_up(module.call(16)) == ("warmed", MIB)

    def test_a_capture_that_was_there_is_its_own_once_it_used_it(self, cache: GraphCache, warm_up: Any) -> None:
        module = Module()
        cache.run(FakeProgram(size=MIB), module.call(16))
        assert warm_up(module.call(16)) == ("warmed", MIB)
        cache.trim()
        assert warm_up(module.call(16))[0] == "warmed"

    def test_without_a_capture_it_is_ready_once_it_ran(self, warm_up: Any) -> None:
        call = Module().call(24, policy=ANYTHING.run_once(OBSERVED))
        assert [warm_up(call) for _ in range(2)] == [("warmed", 0), ("ready", 0)]
