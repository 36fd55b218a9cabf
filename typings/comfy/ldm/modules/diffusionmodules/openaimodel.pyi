from collections.abc import Callable
from typing import Any

import torch

UNetModel: type[torch.nn.Module]
timestep_embedding: Callable[..., torch.Tensor]

def apply_control(h: torch.Tensor, control: Any, name: str) -> torch.Tensor: ...
def forward_timestep_embed(
    ts: Any,
    x: torch.Tensor,
    emb: torch.Tensor,
    context: Any = None,
    transformer_options: Any = {},
    output_shape: Any = None,
    time_context: Any = None,
    num_video_frames: Any = None,
    image_only_indicator: Any = None,
) -> torch.Tensor: ...
