"""Small VAEs of ComfyUI's own classes in this process, and their calls with and without Resolute, counted."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from .families.kit import relative_error

TOLERANCE = 1e-4
SMALL: dict[str, Any] = {
    "ch": 32, "out_ch": 3, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "in_channels": 3,
    "resolution": 256, "double_z": True, "z_channels": 4,
}  # fmt: skip
_COUNTED = ("region_compiles", "compile_failures", "eager_calls")


def kl() -> Any:
    """As SD1.5's and SDXL's, with fewer channels."""
    return _autoencoder(dict(SMALL))


def tiny() -> Any:
    """The same with fewer blocks, for calls in tiles."""
    return _autoencoder({**SMALL, "ch_mult": [1, 1, 1, 1], "num_res_blocks": 1})


def flux2() -> Any:
    """As Flux.2's: what it encodes to is normalised, and four cells become one."""
    vae = _autoencoder({**SMALL, "batch_norm_latent": True})
    vae.downscale_ratio, vae.latent_channels = 16, 16  # as core's loader sets them for such weights
    return vae


def flux() -> Any:
    """As Flux's: 16 channels and no quant convolution. Core knows it by its keys, with the encoder's full width."""
    module = importlib.import_module("comfy.ldm.modules.diffusionmodules.model")
    full = {**SMALL, "ch": 128, "z_channels": 16}
    with torch.inference_mode(False):
        parts = {"encoder": module.Encoder(**full), "decoder": module.Decoder(**{**full, "ch": 32})}
    return of_weights({f"{name}.{key}": value for name, part in parts.items() for key, value in noise(part).items()})


def taesd() -> Any:
    """The small VAE of previews."""
    kind = importlib.import_module("comfy.taesd.taesd").TAESD
    with torch.inference_mode(False):
        return of_weights(noise(kind(latent_channels=4)))


def wan() -> Any:
    """As Wan 2.1's and Qwen-Image's, with fewer channels."""
    kind = importlib.import_module("comfy.ldm.wan.vae").WanVAE
    with torch.inference_mode(False):
        return of_weights(noise(kind(dim=8, z_dim=16, temperal_downsample=[False, True, True])))


def wan22() -> Any:
    """As Wan 2.2's small model has it, with fewer channels."""
    module = importlib.import_module("comfy.ldm.wan.vae2_2")
    small = functools.partial(module.WanVAE, 16, 16, 48, temperal_downsample=[False, True, True])
    with torch.inference_mode(False), mock.patch.object(module, "WanVAE", lambda **sizes: small()):
        return of_weights(noise(small()))


def of_weights(weights: dict[str, torch.Tensor]) -> Any:
    """A comfy.sd.VAE as core's loader makes it."""
    with torch.inference_mode(False):
        return importlib.import_module("comfy.sd").VAE(sd=weights)


def _autoencoder(sizes: dict[str, Any]) -> Any:
    config = {"params": {"ddconfig": sizes, "embed_dim": sizes["z_channels"]}}
    kind = importlib.import_module("comfy.ldm.models.autoencoder").AutoencoderKL
    with torch.inference_mode(False):
        weights = noise(kind(**config["params"]))
        return importlib.import_module("comfy.sd").VAE(sd=weights, config=config)


def noise(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Random weights that keep a signal's variance."""
    weights: dict[str, torch.Tensor] = importlib.import_module("resolute_tiny_models.noise").fill(module, 0)
    return weights


class Compiled:
    """A VAE and its copy behind Compile VAE."""

    def __init__(self, core: SimpleNamespace, vae: Any) -> None:
        self.vae = vae
        self.ours = core.ours("patch.vae").compile_vae(vae, "inductor")
        self.stats = core.ours("process.runtime").cache().stats

    def check(self, call: Callable[[Any], torch.Tensor], bypasses: dict[str, int] | None = None) -> SimpleNamespace:
        """Compare `call(vae)` of the copy with that of the VAE. Returns the counts; only `bypasses` may occur."""
        expected = call(self.vae)
        before = self.stats.snapshot()
        actual = call(self.ours)
        after = self.stats.snapshot()
        assert relative_error(actual, expected) < TOLERANCE
        reasons = {code: n - before["bypasses"].get(code, 0) for code, n in after["bypasses"].items()}
        assert {code: n for code, n in reasons.items() if n} == (bypasses or {})
        rise = {name: after[name] - before[name] for name in (*_COUNTED, "region_calls", "graph_calls")}
        assert rise["compile_failures"] == 0
        return SimpleNamespace(**rise)


def pixels(width: int, height: int, count: int = 1, seed: int = 0) -> torch.Tensor:
    """Images as LoadImage gives them: (count, height, width, 3), 0 to 1."""
    return torch.rand((count, height, width, 3), generator=torch.Generator().manual_seed(seed))
