"""Blocks of families that fill masks: the comparison accepts their code, and refuses it where what it adds is off by 2
percent, or by a step of the result's dtype if that is more.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from .kit import Bench, forget_regions, run_traces
from .models import MODELS, TEXT, Arguments, Model, Size, mask, noise
from .test_recognised import RECOGNISED

COSMOS = Model(
    "cosmos.model.GeneralDIT",
    {
        "max_img_h": 64, "max_img_w": 64, "max_frames": 16, "in_channels": 16, "out_channels": 16, "patch_spatial": 2,
        "patch_temporal": 1, "model_channels": 128, "num_blocks": 2, "num_heads": 2, "crossattn_emb_channels": TEXT,
        "block_x_format": "THWBD", "pos_emb_cls": "rope3d", "affline_emb_norm": True, "use_adaln_lora": True,
        "adaln_lora_dim": 16,
        "extra_per_block_abs_pos_emb": True, "extra_per_block_abs_pos_emb_type": "learnable",
    },
    lambda size: {
        "x": noise(size.batch, 16, size.frames, size.height, size.width), "timestep": torch.rand(size.batch),
        "context": noise(size.batch, size.text, TEXT),
    },
    1, 2, granted="sizes",
)  # fmt: skip
MASKED = {
    **{name: MODELS[name] for name in ("LTX, masked", "Qwen-Image, masked", "HunyuanVideo")},
    **{name: RECOGNISED[name] for name in ("Lens", "Ideogram 4")},
    "Cosmos": COSMOS,  # its class fails with the mask that it would fill
}
CASES = [(name, dtype) for name in MASKED for dtype in (torch.float32, torch.float16, torch.bfloat16)]
CASES.remove(("Lens", torch.float16))  # all its values are NaN in core too, which does not offer it in float16
SIZE = Size(1, 8, 12, 9)


def in_dtype(given: Arguments, dtype: torch.dtype) -> Arguments:
    """As ComfyUI gives them: all in the model's dtype, but for the time."""
    return {
        name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() and name != "timestep"
        else value for name, value in given.items()
    }  # fmt: skip


class Off:
    """Compiled code, but what it adds is larger."""

    def __init__(self, compiled: Any) -> None:
        self.compiled, self.quantized = compiled, compiled.quantized

    def __call__(self, weights: Any, tensors: Any) -> Any:
        def off(result: torch.Tensor) -> torch.Tensor:
            bases = [each.double() for each in tensors if each.shape == result.shape] or [torch.zeros(())]
            added = min((result - base for base in bases), key=torch.norm)
            step = torch.finfo(result.dtype).eps * result.double().norm() / added.norm()
            return (result + max(0.02, float(step)) * added).to(result.dtype)

        return torch.utils._pytree.tree_map(off, self.compiled(weights, tensors))


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_right_code_is_accepted_and_code_that_is_off_refused(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    run_traces(core, monkeypatch)
    forget_regions(core)
    regions = core.inside("backends.inductor.regions.table")
    real, found, masks = regions.difference_from_original, [], []

    def compare(compiled: Any, site: Any, weights: Any, tensors: Any, *others: Any) -> str | None:
        right = real(compiled, site, weights, tensors, *others)
        found.append((site.kind, right, real(Off(compiled), site, weights, tensors, *others)))
        masks.extend(each for each in tensors if each.is_floating_point() and each.min() < -60000)
        return right  # type: ignore[no-any-return]

    monkeypatch.setattr(regions, "difference_from_original", compare)
    model = MASKED[name]
    # In a batch of one Cosmos's code gets another shape, because the batch is no first dimension, and is refused.
    size = Size(2, 8, 12, 9) if name == "Cosmos" else SIZE
    filled = {} if name == "Cosmos" else {"attention_mask": mask(size)}
    bench = Bench(core, model)
    bench.module.to(dtype)
    bench.module.dtype = dtype
    with bench.compiled():
        bench.call(in_dtype({**model.call(size), **filled}, dtype))
    assert found
    assert bool(masks) is bool(filled)
    assert [kind for kind, right, _ in found if right is not None] == []
    assert [kind for kind, _, off in found if off is None] == []
