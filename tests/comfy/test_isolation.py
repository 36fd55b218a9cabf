"""Several backends and the original on one checkpoint, in one graph: none of them affects another."""

from __future__ import annotations

import time
from typing import Any

import pytest

from scripts.server.process import ComfyServer

from .rig import (
    LATENT_TOLERANCE,
    Bench,
    PromptDict,
    assert_same,
    branches,
    compile_model,
    latent_error,
    with_model,
    with_vae,
)

STEPS = 4
pytestmark = pytest.mark.usefixtures("warm")


@pytest.mark.parametrize(
    "order", [(None, "eager", "inductor"), ("inductor", None, "eager"), ("eager", "inductor", None)], ids=str
)
def test_the_original_and_two_backends_in_one_graph(
    bench: Bench, prompt: PromptDict, order: tuple[str | None, ...]
) -> None:
    expected = bench.run(prompt).latents[0]
    prompt["sample"]["inputs"]["denoise"] = 0.999999  # the same steps, but not in ComfyUI's cache
    nodes = [[] if backend is None else [compile_model(backend)] for backend in order]
    ours = bench.run(branches(prompt, dict(zip("abc", nodes, strict=True))))
    assert len(ours.latents) == 3
    assert max(latent_error(latent, expected) for latent in ours.latents) <= LATENT_TOLERANCE
    # The original made none of these calls.
    assert (ours.rise["eager_calls"], ours.rise["graph_calls"]) == (STEPS, STEPS)
    assert (ours.rise["region_compiles"], ours.bypasses) == (0, {})


@pytest.mark.parametrize(
    ("chain", "counter"), [(("eager", "inductor"), "graph_calls"), (("inductor", "eager"), "eager_calls")]
)
def test_the_last_of_two_chained_compile_nodes_decides(
    bench: Bench, prompt: PromptDict, chain: tuple[str, str], counter: str
) -> None:
    expected, ours = bench.run(prompt), bench.run(with_model(prompt, *map(compile_model, chain)))
    assert_same(ours, expected)
    calls = {name: ours.rise[name] for name in ("graph_calls", "eager_calls")}
    assert calls == {"graph_calls": 0, "eager_calls": 0} | {counter: STEPS}
    assert (ours.rise["region_compiles"], ours.bypasses) == (0, {})


@pytest.mark.parametrize("chain", [("eager", "inductor"), ("inductor", "eager")])
def test_the_last_of_two_chained_vae_nodes_decides(
    bench: Bench, tiny_prompt: Any, seed: int, chain: tuple[str, str]
) -> None:
    prompt = tiny_prompt(seed=seed, width=136, height=104)
    expected = bench.run(prompt)
    first = with_vae(prompt, chain[0])
    first["first-vae"] = first.pop("compiled-vae")
    first["decode"]["inputs"]["vae"] = ["first-vae", 0]
    ours = bench.run(with_vae(first, chain[1]))
    assert_same(ours, expected)
    assert (ours.rise["graph_calls"], ours.rise["eager_calls"]) == ((1, 0) if chain[1] == "inductor" else (0, 1))


def test_everything_of_a_deleted_model_is_freed(server: ComfyServer, bench: Bench, prompt: PromptDict) -> None:
    def known() -> set[int]:
        return {module["module"] for module in bench.client.get("/resolute/cache")["modules"]}

    before, models = known(), 4
    for weights in range(100, 100 + models):
        prompt["model"]["inputs"]["seed"] = weights
        bench.run(with_model(prompt, compile_model()))
    assert len(known() - before) >= 1
    bench.client.post("/free", {"unload_models": True, "free_memory": True})
    prompt["model"]["inputs"]["seed"] = 99  # ComfyUI frees dead models while it loads another
    bench.run(with_model(prompt, compile_model()))
    deadline = time.monotonic() + 600  # ... or some seconds later, between two prompts
    while len(known() - before) > 1 and time.monotonic() < deadline:
        time.sleep(0.5)
    assert len(known() - before) <= 1
    assert "memory leak" not in server.log()
