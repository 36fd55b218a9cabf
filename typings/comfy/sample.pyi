from typing import Any

import torch

def fix_empty_latent_channels(model: Any, latent_image: torch.Tensor) -> torch.Tensor: ...
def sample(
    model: Any,
    noise: torch.Tensor,
    steps: int,
    cfg: float,
    sampler_name: str,
    scheduler: str,
    positive: Any,
    negative: Any,
    latent_image: torch.Tensor,
    *,
    disable_pbar: bool = False,
    seed: int | None = None,
) -> torch.Tensor: ...
