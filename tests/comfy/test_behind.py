"""A server that compiles behind the picture: the first prompt waits for nothing, and a later one runs compiled."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from scripts.server.process import ComfyServer

from .rig import Bench, PromptDict, assert_ran_compiled, assert_same, compile_model, compiled, node, with_model

STEPS = 2
MOST_SECONDS = 400  # until all regions of the tiny models are there, on a slow machine


@pytest.fixture(scope="module")
def server(make_server: Callable[..., ComfyServer], tmp_path_factory: pytest.TempPathFactory) -> ComfyServer:
    own = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor"))}
    store = str(tmp_path_factory.mktemp("store"))
    return make_server(
        environment={**own, "RESOLUTE_STORE": store, "RESOLUTE_WORKERS": "2", "RESOLUTE_COMPILE": "behind"}
    )


@pytest.fixture
def bench(server: ComfyServer) -> Bench:
    return Bench(server.client)


def test_the_first_prompt_samples_at_once_and_a_later_one_runs_compiled(
    bench: Bench, server: ComfyServer, tiny_prompt: Callable[..., PromptDict]
) -> None:
    prompts: list[Any] = [tiny_prompt(seed=seed, width=136, height=104, steps=STEPS) for seed in range(2, 4)]
    expected = [bench.run(each) for each in prompts]
    first = bench.run(compiled(prompts[0]))
    assert_same(first, expected[0])
    assert first.rise["region_compiles"] == first.rise["region_calls"] == first.rise["graph_calls"] == 0
    assert first.rise["waiting_calls"] == first.rise["eager_calls"] == STEPS + 1
    assert first.bypasses == {}
    # Cancel ends the prompt, and not what compiles.
    long = compiled(tiny_prompt(seed=1, width=136, height=104, steps=5000))
    assert "interrupted" in bench.cancel_once(long, lambda: bool(bench.texts("trace")))
    ends, compiles = time.monotonic() + MOST_SECONDS, 0
    for number in itertools.count():  # ComfyUI does not sample again what it has just sampled
        cfg = 5.0 + number * 1e-9
        again = bench.run(compiled(tiny_prompt(seed=3, width=136, height=104, steps=STEPS, cfg=cfg)))
        compiles += again.rise["region_compiles"]
        assert_same(again, expected[1])  # with each mixture of originals and code
        if not again.rise["waiting_calls"]:
            break
        assert time.monotonic() < ends, server.log()[-5000:]
        time.sleep(3)
    assert compiles > 5
    other: Any = tiny_prompt(seed=4, width=72, height=200, steps=STEPS)
    assert_same(last := bench.run(compiled(other)), bench.run(other))
    assert_ran_compiled(last, STEPS + 1)


def test_a_warm_up_waits(bench: Bench, tiny_prompt: Callable[..., PromptDict]) -> None:
    prompt: Any = with_model(tiny_prompt(kind="sdxl"), compile_model())
    given = {"sizes": "64x64", "batch_sizes": "1", "prompt_chunks": "1", "cfg": 5.0}
    prompt["warm"] = node("ResoluteWarmUp", model=prompt["sample"]["inputs"]["model"], **given)
    for name in ("sample", "decode", "image", "samples", "latent"):
        del prompt[name]
    run = bench.run(prompt)
    assert run.rise["waiting_calls"] == run.rise["eager_calls"] == 0
    assert run.rise["region_compiles"] > 0
