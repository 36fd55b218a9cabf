"""VAEs of other layouts, latents for them without a model, and decoding with little memory."""

from __future__ import annotations

import copy
import math
from typing import Any

import comfy.sd
import comfy.taesd.taesd
import torch
from comfy.ldm.modules.diffusionmodules.model import Decoder
from comfy.ldm.wan.vae import WanVAE

from .node import SEED, Node, whole
from .noise import fill

DECODER: dict[str, Any] = {
    "ch": 32,
    "out_ch": 3,
    "ch_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_resolutions": [],
    "in_channels": 3,
    "resolution": 256,
}
LAYOUTS = ("with quant conv", "without quant conv", "taesd", "video", "none")


class ResoluteTestVAE(Node):
    """A small VAE that core recognises by its keys; image VAEs have weights only in the decoder.

    SD1.5 and SDXL have 4 channels and a quant convolution, Flux and SD3 have 16 channels and none.
    """

    RETURN_TYPES = ("VAE",)
    FUNCTION = "build"
    INPUTS = {
        "seed": SEED,
        "channels": whole(4, 1, 64),
        "layout": (list(LAYOUTS),),
    }

    def build(self, seed: int, channels: int, layout: str) -> tuple[Any]:
        """channels: of the latent."""
        if layout == "none":  # core's result for a checkpoint without a VAE
            return (comfy.sd.VAE(sd={}),)
        if layout == "video":
            return (comfy.sd.VAE(sd=noise(WanVAE(dim=8, z_dim=16, temperal_downsample=[False, True, True]), "", seed)),)
        if layout == "taesd":
            return (comfy.sd.VAE(sd=noise(comfy.taesd.taesd.TAESD(latent_channels=channels), "", seed)),)
        weights = noise(Decoder(**DECODER, z_channels=channels), "decoder.", seed)
        if layout == "with quant conv":
            weights |= noise(torch.nn.Conv2d(channels, channels, 1), "post_quant_conv.", seed)
        return (comfy.sd.VAE(sd=weights),)


class ResoluteTestLatent(Node):
    """Random samples, as a model with that many latent channels would give to a decoder."""

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "make"
    INPUTS = dict.fromkeys(("seed", "channels", "width", "height", "batch"), whole(4))

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {**super().INPUT_TYPES(), "optional": {"frames": whole(0, 0, 64)}}

    def make(self, seed: int, channels: int, width: int, height: int, batch: int, frames: int = 0) -> tuple[Any]:
        """width, height: in pixels, eight per latent cell. frames: of a latent video; 0 for images."""
        generator = torch.Generator("cpu").manual_seed(seed)
        time = (frames,) if frames else ()
        return ({"samples": torch.randn((batch, channels, *time, height // 8, width // 8), generator=generator)},)


class ResoluteTestVAEMemory(Node):
    """Makes core find memory for decoding `at_once` images, so that it decodes a batch in parts of that size."""

    RETURN_TYPES = ("VAE",)
    FUNCTION = "change"
    INPUTS = {"vae": ("VAE",), "at_once": whole(1, 1, 64)}

    def change(self, vae: Any, at_once: int) -> tuple[Any]:
        """A copy whose memory estimate is a fraction of the free memory, because core divides one by the other."""
        changed = copy.copy(vae)
        changed.memory_used_decode = lambda shape, dtype: vae.patcher.get_free_memory(vae.device) / (at_once + 0.5)
        return (changed,)


class ResoluteTestVAEOutOfMemory(Node):
    """A decoder that runs out of memory above `limit` latent pixels, so that core decodes in tiles."""

    RETURN_TYPES = ("VAE",)
    FUNCTION = "change"
    INPUTS = {"vae": ("VAE",), "limit": whole(1024, 1, 2**20)}

    def change(self, vae: Any, limit: int) -> tuple[Any]:
        """A copy that fails in the decoder's first convolution, compiled or not."""
        changed = copy.copy(vae)
        changed.patcher = vae.patcher.clone()
        inner = changed.patcher.get_model_object("decoder.conv_in.forward")

        def forward(z: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if math.prod(z.shape[2:]) > limit:
                raise torch.cuda.OutOfMemoryError("ResoluteTestVAEOutOfMemory: asked to run out of memory")
            return inner(z, *args, **kwargs)

        changed.patcher.add_object_patch("decoder.conv_in.forward", forward)
        return (changed,)


def noise(module: torch.nn.Module, prefix: str, seed: int) -> dict[str, torch.Tensor]:
    """A random state dict, each name with a prefix."""
    return {prefix + name: weight for name, weight in fill(module, seed).items()}
