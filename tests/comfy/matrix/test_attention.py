"""Attention of ComfyUI's that a person chose: part of compiled blocks, and the same picture as without Resolute."""

from __future__ import annotations

from typing import Any

import pytest

from ..rig import flux_prompt, node, with_sampling
from .kit import Check
from .placing import check_placed, placed

STEPS = 4
TORCHS = node("ModelAttentionBackend", attention="pytorch attention")
ANOTHER = node("ResoluteTestAttention")  # it stands for SageAttention


@pytest.fixture(autouse=True)
def chosen_for_a_model(check: Check) -> None:
    if TORCHS["class_type"] not in check.bench.client.get("/object_info"):
        pytest.skip("in this ComfyUI no attention is chosen for a model")


@pytest.mark.parametrize("kind", ["UNet", pytest.param("transformer", marks=pytest.mark.long)])
def test_a_chosen_attention_runs_inside_compiled_blocks(
    check: Check, prompt: Any, make_model: Any, seeds: Any, kind: str
) -> None:
    if kind == "transformer":
        prompt = flux_prompt(prompt, make_model("flux-tiny"))
    check.bench.run(placed(prompt, [ANOTHER], "before", check.backend))  # it compiles, unless a test before did
    for place, (width, batch) in (("before", (136, 1)), ("after", (168, 2))):
        prompt["latent"]["inputs"].update(width=width, batch_size=batch)
        prompt["sample"]["inputs"]["seed"] = next(seeds)
        run = check_placed(check, prompt, [ANOTHER], place, forwards=STEPS)
        assert check.on_cuda or check.backend != "inductor" or run.rise["region_calls"] > 0


def test_torchs_own_chosen_by_name_is_what_blocks_compute_anyway(check: Check, prompt: Any) -> None:
    check(prompt, placed(prompt, [TORCHS], "before", check.backend), forwards=STEPS)


@pytest.mark.parametrize(
    "patch",
    [
        node("NAGuidance", nag_scale=5.0, nag_alpha=0.5, nag_tau=1.5),
        pytest.param(node("FluxKVCache"), marks=pytest.mark.long),
    ],
    ids=lambda patch: patch["class_type"],
)
def test_a_patch_of_cores_own_runs_between_compiled_parts_of_a_block(
    check: Check, prompt: Any, make_model: Any, seeds: Any, patch: dict[str, Any]
) -> None:
    if patch["class_type"] not in check.bench.client.get("/object_info"):
        pytest.skip("this ComfyUI has no such node")
    caches = patch["class_type"] == "FluxKVCache"  # of reference images; core has it for Flux 2 alone
    prompt = with_sampling(flux_prompt(prompt, make_model("klein-tiny" if caches else "flux-tiny")), cfg=3.0)
    if caches:
        prompt["latent"]["class_type"] = "EmptyFlux2LatentImage"
        prompt["of_reference"] = node("ResoluteTestLatent", seed=1, channels=128, width=64, height=64, batch=1)
    for name in ("positive", "negative") if caches else ():
        prompt[f"{name}_reference"] = node("ReferenceLatent", conditioning=[name, 0], latent=["of_reference", 0])
        prompt[name]["inputs"]["width"] = 7680
        prompt["sample"]["inputs"][name] = [f"{name}_reference", 0]
    check.bench.run(placed(prompt, [patch], "before", check.backend))  # it compiles
    for width, batch in ((136, 1), (168, 2)):
        prompt["latent"]["inputs"].update(width=width, batch_size=batch)
        prompt["sample"]["inputs"]["seed"] = next(seeds)
        run = check_placed(check, prompt, [patch], "before", forwards=STEPS)
        assert check.on_cuda or check.backend != "inductor" or run.rise["region_calls"] > 0
