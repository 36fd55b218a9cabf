"""Cosmos Predict 2 and Anima: a layer of einops, and tensors that the forward keeps on the model and never reads."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

SIZES = {
    "max_img_h": 16, "max_img_w": 16, "max_frames": 4, "in_channels": 4, "out_channels": 4, "patch_spatial": 2,
    "patch_temporal": 1, "model_channels": 64, "num_blocks": 2, "num_heads": 2, "crossattn_emb_channels": 32,
    "pos_emb_cls": "rope3d", "use_adaln_lora": True, "adaln_lora_dim": 8,
}  # fmt: skip
KEPT = {"affline_emb", "affline_scale_log_info", "crossattn_emb"}


@pytest.fixture(params=["comfy.ldm.cosmos.predict2.MiniTrainDIT", "comfy.ldm.anima.model.Anima"])
def model(request: pytest.FixtureRequest, core: SimpleNamespace) -> Any:
    where, _, name = request.param.rpartition(".")
    operations = importlib.import_module("comfy.ops").disable_weight_init
    torch.manual_seed(0)
    made = getattr(importlib.import_module(where), name)(
        **SIZES, device="cpu", dtype=torch.float32, operations=operations
    )
    for name, parameter in made.named_parameters():
        if "llm_adapter" not in name:  # large, and only a text of another encoder comes to it
            torch.nn.init.normal_(parameter, std=0.1)
    return made.eval().requires_grad_(False)


def call(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    latent, context = (torch.randn(shape, generator=generator) for shape in ((1, 4, 1, 8, 8), (1, 7, 32)))
    with torch.inference_mode():
        result: torch.Tensor = model._forward(latent, torch.tensor([0.5]), context)
    return result


def test_nothing_forbids_a_capture_of_its_code(core: SimpleNamespace, model: Any) -> None:
    code, kinds = core.ours("trust.model_code"), frozenset(map(type, model.modules()))
    assert code.blocker(kinds, code.reaches().of(kinds), ()) is None


def test_what_it_keeps_is_put_back_after_a_capture(core: SimpleNamespace, model: Any) -> None:
    kept = core.inside("backends.cuda_graphs.kept_tensors")
    with kept.forbid_retained_reads(model):
        expected = call(model)
    before = {name: vars(model)[name] for name in KEPT}
    with kept.restore_attributes(model):
        assert torch.equal(call(model), expected)
        assert all(vars(model)[name] is not value for name, value in before.items())
    assert all(vars(model)[name] is value for name, value in before.items())
