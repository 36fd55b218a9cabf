"""Bug reports about models beside these families: a function as an argument, one that closes over settings, and a
setting of numpy's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from .kit import Bench, CompiledMethod, forget_regions, run_traces
from .models import MODELS, Size, noise


@pytest.fixture(autouse=True)
def _traces(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    run_traces(core, monkeypatch)
    forget_regions(core)
    core.ours("blocks.transformers.block_forward")._learned.cache_clear()


def made(core: SimpleNamespace, kind: str, **settings: Any) -> Any:
    """A model of core's with made up weights."""
    module, _, name = kind.rpartition(".")
    operations = core.comfy.ops.disable_weight_init
    model = getattr(importlib.import_module(f"comfy.ldm.{module}"), name)(
        **settings, dtype=torch.float32, device="cpu", operations=operations
    )
    torch.manual_seed(0)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    return model.eval().requires_grad_(False)


def answering(model: Any, given: Callable[[], dict[str, Any]]) -> Callable[[], Any]:
    def call() -> Any:
        with torch.inference_mode():
            return model(**given())

    return call


def test_hidream_o1_gives_its_blocks_a_function_and_they_run_eagerly_with_a_reason(core: SimpleNamespace) -> None:
    text = {
        "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "rope_dims": [6, 5, 5],
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "depth": 2, "num_position_embeddings": 16,
        "deepstack_visual_indexes": (0,),
    }  # fmt: skip
    kind = "hidream_o1.model.HiDreamO1Transformer"
    model = made(core, kind, text_config_overrides=text, vision_config_overrides=vision)
    model.tms_token_id = 99
    ids = torch.arange(9)[None].clone()
    ids[:, -1] = 99
    x, times, places = noise(1, 3, 128, 96), torch.rand(1) * 1000, torch.arange(21)[None, None].repeat(1, 3, 1).float()

    def given() -> dict[str, Any]:
        model.clear_kv_cache()
        return {"x": x.clone(), "timesteps": times, "input_ids": ids, "position_ids": places, "ar_len": 8}

    bench = CompiledMethod(core, model, "_forward", core.roles.UNET)
    bench.compare(answering(model, given))
    assert "TransformerBlock" in str([event.text for event in bench.stats.events if event.kind == "bypass"])


def test_blocks_of_pid_with_other_reference_sizes_share_no_region(core: SimpleNamespace) -> None:
    small = {
        "num_groups": 2, "hidden_size": 64, "pixel_hidden_size": 8, "pixel_attn_hidden_size": 32,
        "pixel_num_groups": 2, "patch_depth": 3, "pixel_depth": 2, "txt_embed_dim": 32,
    }  # fmt: skip
    x, context, times = noise(1, 3, 384, 256), noise(1, 9, 32), torch.tensor([500.0])
    more = {"lq_latent": noise(1, 16, 12, 8), "degrade_sigma": torch.tensor([0.3])}
    digest, policy = (
        core.inside("modules.structure").structure_digest,
        core.ours("comfyui.module_attributes").ATTRIBUTES,
    )
    digests, compiles = [], []
    for reference in (1024, 2048, 1024):
        model = made(core, "pixeldit.pid.PidNet", rope_ref_h=reference, rope_ref_w=reference, **small)
        digests.append(digest(model.pixel_blocks[0], policy=policy))
        bench = CompiledMethod(core, model, "_forward", core.roles.UNET)
        given = lambda: {"x": x.clone(), "timesteps": times, "context": context.clone(), **more}  # noqa: E731
        found = bench.compare(answering(model, given), {})
        assert found["region_calls"] == 5
        compiles.append(found["region_compiles"])
    assert compiles == [2, 1, 0], "the pixel blocks alone differ"
    assert (digests[0] == digests[2], digests[0] == digests[1]) == (True, False)


class TestNumbersOfNumpy:
    """The eps of a LayerNorm is part of the key as any number is, and a change of it is seen."""

    SIZE = Size(1, 8, 8, 7)

    def bench(self, core: SimpleNamespace, *eps: float) -> Bench:
        bench = Bench(core, MODELS["SD3.5"])
        norms = [part for part in bench.module.modules() if isinstance(part, torch.nn.LayerNorm)]
        assert len(norms) > len(eps)
        for number, norm in enumerate(norms):
            norm.eps = np.float64(eps[number % len(eps)])
        return bench

    def test_equal_numbers_share_regions_and_others_do_not(self, core: SimpleNamespace) -> None:
        assert self.bench(core, 1e-6).check(self.SIZE)["region_compiles"] == 2
        assert self.bench(core, 1e-6).check(self.SIZE)["region_compiles"] == 0
        assert self.bench(core, 0.5).check(self.SIZE)["region_compiles"] == 2

    def test_blocks_of_one_model_may_differ_in_it(self, core: SimpleNamespace) -> None:
        bench = self.bench(core, 1e-6)
        last = [part for part in bench.module.joint_blocks[0].modules() if isinstance(part, torch.nn.LayerNorm)]
        last[0].eps = np.float64(0.5)
        assert bench.check(self.SIZE)["region_compiles"] == 3

    def test_a_change_between_two_runs_is_seen(self, core: SimpleNamespace) -> None:
        bench = self.bench(core, 1e-6)
        bench.check(self.SIZE)
        for part in bench.module.modules():
            if isinstance(part, torch.nn.LayerNorm):
                part.eps = np.float64(0.5)
        bench.begin_run()
        assert bench.check(self.SIZE)["region_compiles"] == 2
