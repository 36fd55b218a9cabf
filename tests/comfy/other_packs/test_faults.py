"""A patch that raises, a model that is deleted in the middle of a run, a decode without memory: what comes after it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from tests.contract.out_of_memory import OutOfMemoryAt

from .conftest import Bench

STEPS = 3
_MOST = 1000


def raising_at(model: Any, kind: str, number: int) -> Any:
    """The model with a wrapper of another pack that raises at its n-th call, after the model has answered."""
    calls = iter(range(1, _MOST))

    def broken(executor: Any, *args: Any, **kwargs: Any) -> Any:
        answer = executor(*args, **kwargs)
        if next(calls) == number:
            raise ZeroDivisionError("of another pack")
        return answer

    clone = model.clone()
    clone.add_wrapper(kind, broken)
    return clone


@pytest.mark.grid(4)
@pytest.mark.parametrize("kind", ["apply_model", "diffusion_model", "calc_cond_batch", "outer_sample"])
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_patch_that_raises_at_any_call_leaves_the_next_run_right(bench: Bench, kind: str, place: str) -> None:
    model = bench.model()
    expected = bench.sample(model)
    ours = bench.compiled(model)
    cache = bench.core.ours("process.runtime").cache()
    for number in range(1, STEPS + 1):
        broken = (
            bench.compiled(raising_at(model, kind, number)) if place == "before" else raising_at(ours, kind, number)
        )
        if kind == "outer_sample" and number > 1:
            continue  # one call
        with pytest.raises(ZeroDivisionError, match="of another pack"):
            bench.sample(broken)
        assert not cache._captures._sessions, "the run is over and still keeps its captures"
        assert torch.equal(bench.sample(ours), expected)
        assert torch.equal(bench.sample(model), expected)


@pytest.mark.parametrize("unload", [False, True])
def test_a_model_deleted_in_the_middle_of_a_run_is_freed_after_it(bench: Bench, unload: bool) -> None:
    expected, bypassed = bench.sample(bench.model()), bench.bypasses()
    models = [bench.compiled(bench.model())]
    network = weakref.ref(models[0].model.diffusion_model)
    owner = bench.core.ours("process.runtime").record_of(network()).owner

    def delete(step: int, *_: Any) -> None:
        models.clear()
        if unload and step == 0:
            bench.unload()
        gc.collect()

    assert torch.equal(bench.sample(models[0], callback=delete), expected)
    assert models == []
    assert bench.bypasses() == bypassed + (STEPS - 1 if unload else 0)
    assert ("it was unloaded during the run" in bench.caplog.text) is unload
    bench.unload()
    bench.core.comfy.model_management.cleanup_models()
    gc.collect()
    assert network() is None, "something keeps the network alive"
    assert torch.equal(bench.sample(bench.compiled(bench.model())), expected)
    assert owner not in bench.core.ours("process.runtime")._records


def test_a_decode_without_memory_at_any_allocation_is_finished_in_tiles(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The mode that fails is no other pack's.
    monkeypatch.setattr(bench.core.ours("patch.module_runner"), "intercepting_mode", lambda: None)
    vae = bench.vae()
    latent = torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(2))
    expected, ours = vae.decode(latent), bench.compiled_vae(vae)
    differences = list[float]()
    for number in range(1, _MOST):
        failing = OutOfMemoryAt(number)
        try:
            with failing:
                differences.append(float((ours.decode(latent) - expected).abs().max()))
        except torch.OutOfMemoryError:  # outside of what ComfyUI repeats in tiles
            assert failing.failed
        assert torch.equal(ours.decode(latent), expected), f"after allocation {number} failed"
        if not failing.failed:
            break
    assert number > 20
    assert len(differences) > number / 2
    assert max(differences) < 0.05
