"""Small decoders of videos of ComfyUI's own classes with random weights."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

_KL: dict[str, Any] = {
    "double_z": True, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32, "ch_mult": [1, 1, 1],
    "num_res_blocks": 0, "attn_resolutions": [], "dropout": 0.0, "z_channels": 4, "conv3d": True, "time_compress": 2,
}  # fmt: skip
_REFINER: dict[str, Any] = {
    "z_channels": 8, "out_channels": 3, "block_out_channels": [32, 32], "num_res_blocks": 0, "ffactor_spatial": 4,
    "ffactor_temporal": 2,
}  # fmt: skip
_COSMOS: dict[str, Any] = {
    "z_channels": 4, "latent_channels": 4, "z_factor": 1, "resolution": 1024, "in_channels": 3, "out_channels": 3,
    "channels": 8, "channels_mult": [2, 2], "num_res_blocks": 1, "attn_resolutions": [32], "dropout": 0.0,
    "patch_size": 4, "num_groups": 1, "temporal_compression": 8, "spacial_compression": 8,
}  # fmt: skip
_MOCHI: dict[str, Any] = {
    "out_channels": 3, "latent_dim": 4, "base_channels": 32, "channel_multipliers": [1, 2],
    "temporal_expansions": [2], "spatial_expansions": [2], "num_res_blocks": [1, 1, 1], "has_attention": [False] * 3,
    "padding_mode": "replicate", "output_norm": False, "causal": True,
}  # fmt: skip
_LTX: dict[str, Any] = {
    "dims": 3, "in_channels": 8, "out_channels": 3, "base_channels": 8, "patch_size": 4, "norm_layer": "pixel_norm",
    "causal": False,
    "blocks": [
        ["res_x", {"num_layers": 1}],
        ["compress_all", {"residual": True, "multiplier": 2}],
        ["res_x", {"num_layers": 2}],
    ],
}  # fmt: skip
_WAN: dict[str, Any] = {"z_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 1, "temperal_downsample": [True]}


@dataclass(frozen=True)
class Decoder:
    """kind: "module.Class" below comfy.ldm. settings: of a small one. part: of it, that has the method. channels: of
    the latent. arguments: by name, beside the latent. compiles: all regions. unused: that are counted all the same.
    """

    kind: str
    settings: dict[str, Any]
    channels: int
    compiles: int
    part: str = ""
    method: str = "forward"
    unused: int = 0
    arguments: dict[str, Any] = field(default_factory=dict)

    def make(self) -> Any:
        """The module that has the method."""
        where, _, name = self.kind.rpartition(".")
        torch.manual_seed(0)
        kind: Callable[..., torch.nn.Module] = getattr(importlib.import_module(f"comfy.ldm.{where}"), name)
        made = kind(**self.settings)
        with torch.no_grad():
            for weight_name, weight in made.named_parameters():
                _fill(weight_name, weight)
        return made.get_submodule(self.part).eval()

    def latent(self, batch: int, frames: int, height: int, width: int) -> torch.Tensor:
        return torch.randn((batch, self.channels, frames, height, width), generator=torch.Generator().manual_seed(1))


def _fill(name: str, weight: torch.Tensor) -> None:
    """Random values that keep a signal's variance, and moves it enough for a wrong scale or shift to show."""
    if name.endswith("scale_multiplier"):
        weight.fill_(1000.0)
    elif weight.ndim < 2 or name.endswith("gamma"):
        weight.copy_(torch.randn(weight.shape) * 0.1 + (0.0 if name.endswith("bias") else 1.0))
    else:
        weight.copy_(torch.randn(weight.shape) * math.prod(weight.shape[1:]) ** -0.5)


DECODERS = {
    "Wan 2.1": Decoder("wan.vae.WanVAE", {"dim": 8, **_WAN}, 4, 14, method="decode"),
    "Wan 2.2": Decoder("wan.vae2_2.WanVAE", {"dim": 4, "dec_dim": 8, **_WAN}, 4, 10, method="decode"),
    "HunyuanVideo": Decoder("modules.diffusionmodules.model.Decoder", _KL, 4, 17),
    "HunyuanVideo 1.5": Decoder("hunyuan_video.vae_refiner.Decoder", _REFINER, 8, 18),
    "HunyuanImage 2.1": Decoder(
        "hunyuan_video.vae_refiner.Decoder", {**_REFINER, "refiner_vae": False}, 8, 7, unused=1
    ),
    "LTX": Decoder(
        "lightricks.vae.causal_video_autoencoder.Decoder",
        {**_LTX, "timestep_conditioning": True, "spatial_padding_mode": "reflect"},
        8,
        13,
        arguments={"timestep": 0.05},
    ),
    "LTX-2": Decoder(
        "lightricks.vae.causal_video_autoencoder.Decoder",
        {**_LTX, "timestep_conditioning": False, "spatial_padding_mode": "zeros"},
        8,
        13,
    ),
    "MiniMax H3": Decoder(
        "minimax.vae.ViT3DDecoder",
        {"patch_size": 4, "patch_size_t": 2, "in_channels": 8, "num_layers": 2, "heads": 2, "dim_head": 16},
        8,
        1,
    ),
    "Cosmos": Decoder("cosmos.vae.CausalContinuousVideoTokenizer", _COSMOS, 4, 8, part="decoder"),
    "Mochi": Decoder("genmo.vae.model.Decoder", _MOCHI, 4, 4),
}
