"""What Warm Up passes to a model: latents of the shape that the model's latent format has. In this process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

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
    key = core.ours("warm_up.run")._conditioning_key

    def of(**more: Any) -> Any:
        text = [[torch.zeros(1, 77, WIDTH), more]]
        return key((text, text))

    assert of(latents=[torch.zeros(1, 4, 8, 8)]) == of(latents=[torch.ones(1, 4, 8, 8)])
    assert of(latents=[torch.zeros(1, 4, 8, 8)]) != of(latents=[torch.zeros(1, 4, 8, 9)])
    assert of(strength=0) != of(strength=None)
    first, second = torch.nn.Identity(), torch.nn.Identity()
    assert of(hook=first) == of(hook=first) != of(hook=second)
