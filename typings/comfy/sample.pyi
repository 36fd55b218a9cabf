from typing import Any

import torch

def fix_empty_latent_channels(model: Any, latent_image: torch.Tensor) -> torch.Tensor: ...
def sample_custom(
    model: Any,
    noise: torch.Tensor,
    cfg: float,
    sampler: Any,
    sigmas: torch.Tensor,
    positive: Any,
    negative: Any,
    latent_image: torch.Tensor,
    noise_mask: torch.Tensor | None = None,
    callback: Any = None,
    disable_pbar: bool = False,
    seed: int | None = None,
) -> torch.Tensor: ...
