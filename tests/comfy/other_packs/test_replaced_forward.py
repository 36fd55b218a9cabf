"""Where another pack runs the model in place of Compile Model, the picture is its own and the node names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from . import packs
from .conftest import Bench

STEPS = 3
WHOLE = "no calls: another node put Compiled (tests) in place of the whole network"
REPLACED = "no calls: cached_forward (tests) replaced the model's _forward"
ANSWERED = "no calls: swap_and_call (tests) answered in place of the model in every step"
OURS = f"{STEPS} eager calls"
# What another pack does to the model, before Compile Model or after it: what the run then says, and what it counts.
PACKS: dict[str, tuple[Callable[[Any], Any], str, str, int]] = {
    "a forward for each call, before": (packs.with_forward_for_each_call, "before", REPLACED, STEPS),
    "a forward for each call, after": (packs.with_forward_for_each_call, "after", REPLACED, STEPS),
    # Its forward is the module's own, in which our `_forward` is called as ever.
    "another network, after": (packs.with_compiled_network, "after", OURS, 0),
    "a network for each call, before": (packs.with_network_for_each_call, "before", WHOLE, STEPS),
    "a network for each call, after": (packs.with_network_for_each_call, "after", ANSWERED, 1),
    "the network in its own place, before": (packs.with_network_in_its_own_place, "before", OURS, 0),
    "the network in its own place, after": (packs.with_network_in_its_own_place, "after", OURS, 0),
}


@pytest.mark.parametrize("name", PACKS)
def test_what_runs_in_place_of_ours_gives_its_own_picture_and_is_named_and_counted(bench: Bench, name: str) -> None:
    changed, place, said, count = PACKS[name]
    model = bench.model()
    expected = bench.sample(changed(model))
    ours = bench.compiled(changed(model)) if place == "before" else changed(bench.compiled(model))
    for _ in range(2):  # the second time the patch is in place already
        before = bench.bypasses()
        assert torch.equal(bench.sample(ours), expected)
        assert said in bench.summary
        assert bench.bypasses() == before + count
        assert (f"bypassed: {count}x replaced_forward" in bench.summary) == bool(count)


def test_a_network_that_was_exchanged_is_named_when_it_is_compiled(bench: Bench) -> None:
    model = bench.model()
    expected, before = bench.sample(model), bench.bypasses()
    bench.caplog.clear()
    ours = bench.compiled(packs.with_compiled_network(model))
    assert "another node put Compiled (tests) in place of the whole network" in bench.caplog.text
    assert bench.bypasses() == before + 1
    assert torch.equal(bench.sample(ours), expected)


def test_a_network_with_code_of_its_own_is_named_and_counted(bench: Bench) -> None:
    model = bench.model()
    ours = bench.compiled(model)
    network = ours.get_model_object("diffusion_model")
    compiled = packs.Compiled(network)
    compiled.forward = lambda x, *args, **kwargs: x * 0.5
    ours.add_object_patch("diffusion_model", compiled)
    before = bench.bypasses()
    bench.sample(ours)
    assert bench.bypasses() == before + STEPS
    assert "no calls: another node put Compiled (tests) in place of the whole network" in bench.summary


def test_a_pack_that_answers_every_step_is_named_and_counted(bench: Bench) -> None:
    before = bench.bypasses()
    bench.sample(packs.with_answers_of_its_own(bench.compiled(bench.model())))
    assert bench.bypasses() == before + 1
    assert "no calls: answer_for_model (tests) answered in place of the model in every step" in bench.summary


def test_a_pack_that_answers_some_steps_is_no_reason_to_complain(bench: Bench) -> None:
    before = bench.bypasses()
    bench.sample(packs.with_some_steps_skipped(bench.compiled(bench.model())))
    assert bench.bypasses() == before
    assert "2 eager calls" in bench.summary


def test_the_next_run_without_the_other_pack_runs_through_ours(bench: Bench) -> None:
    model = bench.model()
    expected = bench.sample(model)
    ours = bench.compiled(model)
    bench.sample(packs.with_forward_for_each_call(ours))
    before = bench.bypasses()
    assert torch.equal(bench.sample(ours), expected)
    assert bench.bypasses() == before
    assert "no calls" not in bench.summary


def test_the_pack_of_a_function_is_its_folder_in_custom_nodes(
    bench: Bench, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util
    from pathlib import Path

    file = Path(str(tmp_path)) / "custom_nodes" / "Some-Pack" / "caching.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "import functools\n"
        "def outer():\n    def cached(): ...\n    return cached\n"
        "def wrapping(function):\n    @functools.wraps(function)\n"
        "    def faster(*args, **kwargs):\n        return function(*args, **kwargs)\n    return faster\n"
    )
    spec = importlib.util.spec_from_file_location("custom_nodes.Some-Pack.caching", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, spec.name, module)
    spec.loader.exec_module(module)
    describe = bench.core.ours("trust.describe").describe_code
    assert describe(module.outer()) == "cached (Some-Pack)"
    sampler = bench.core.comfy.samplers.k_diffusion_sampling.sample_euler
    wrapped = module.wrapping(sampler)
    assert describe(wrapped) == "faster (Some-Pack)", "it has the name of what it wraps"
    assert describe(sampler) == "sample_euler (comfy)"
    is_core_function = bench.core.ours("trust.core_code").is_core_function
    assert is_core_function(sampler, "comfy.k_diffusion.sampling")
    assert not is_core_function(wrapped, "comfy.k_diffusion.sampling")
    optimized = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    assert describe(optimized) == "OptimizedModule (torch.compile)"
