"""Models without a row in the catalogue: what their first call does not show costs no compile later.

At batch 1 no tensor shows if a batch shares it.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from .kit import Bench, forget_regions, run_traces
from .models import Arguments, Model, Size, noise

RECOGNISED = {
    "Kandinsky 5": Model(
        "kandinsky5.model.Kandinsky5",
        {
            "in_visual_dim": 16, "out_visual_dim": 16, "in_text_dim": 48, "in_text_dim2": 32, "time_dim": 64,
            "model_dim": 128, "ff_dim": 192, "axes_dims": (16, 24, 24), "num_text_blocks": 2, "num_visual_blocks": 3,
            "visual_embed_dim": 132,
        },
        lambda size: given(
            size, noise(size.batch, 33, 3, 2 * size.height, 2 * size.width), 48, y=noise(size.batch, 32)
        ),
        2, 5, granted="sizes",
    ),
    "Lens": Model(
        "lens.model.LensTransformer2DModel",
        {
            "in_channels": 128, "out_channels": 32, "num_layers": 3, "num_attention_heads": 2, "enc_hidden_dim": 24,
            "selected_layer_index": (0, 1, 2, 3),
        },
        lambda size: given(
            size, noise(size.batch, 128, size.height, size.width), 96,
            attention_mask=(torch.arange(size.text) < size.text - 2)[None].repeat(size.batch, 1),
        ),
        1, 3, granted="sizes",
    ),
    "Ideogram 4": Model(
        "ideogram4.model.Ideogram4Transformer2DModel",
        {
            "in_channels": 128, "num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 32,
            "intermediate_size": 96, "adaln_dim": 32, "llm_features_dim": 48, "mrope_section": (6, 5, 5),
        },
        lambda size: given(size, noise(size.batch, 128, size.height, size.width), 48), 1, 3, granted="sizes",
    ),
}  # fmt: skip
LATER = [Size(1, 6, 4, 17), Size(2, 4, 6, 24), Size(3, 5, 5, 33), Size(1, 4, 8, 9), Size(2, 6, 6, 40)]


def given(size: Size, x: torch.Tensor, width: int, **more: torch.Tensor) -> Arguments:
    context = noise(size.batch, size.text, width)
    return {"x": x, "timestep": torch.rand(size.batch) * 1000, "context": context, **more}


@pytest.mark.parametrize("name", list(RECOGNISED))
@pytest.mark.parametrize("batch", [1, 2])
def test_it_compiles_in_its_first_call_only(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str, batch: int
) -> None:
    run_traces(core, monkeypatch)
    forget_regions(core)
    core.ours("blocks.transformers.block_forward")._learned.cache_clear()
    bench = Bench(core, RECOGNISED[name])
    assert bench.check(Size(batch, 4, 6, 9)) == bench.counts(bench.model.compiles)
    bench.check_all(LATER)
