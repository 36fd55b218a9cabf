"""VAEs of real width with random weights, for `cards`; narrow ones for tests on the CPU."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

_KL: dict[str, Any] = {
    "double_z": True, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128, "ch_mult": [1, 2, 4, 4],
    "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0, "z_channels": 16, "conv3d": True, "time_compress": 4,
}  # fmt: skip
_BOTH = ("Encoder", "Decoder")
_REFINER = "comfy.ldm.hunyuan_video.vae_refiner"
_SETTINGS: dict[str, Any] = {
    "block_out_channels": [128, 256, 512, 1024, 1024], "in_channels": 3, "out_channels": 3, "num_res_blocks": 2,
    "ffactor_spatial": 16, "ffactor_temporal": 4, "downsample_match_channel": True, "upsample_match_channel": True,
    "z_channels": 32,
}  # fmt: skip
_REFINED = {
    "regularizer_config": {"target": "comfy.ldm.models.autoencoder.EmptyRegularizer"},
    **{f"{part.lower()}_config": {"target": f"{_REFINER}.{part}", "params": _SETTINGS} for part in _BOTH},
}
_WAN: dict[str, Any] = {
    "dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "temperal_downsample": [False, True, True]
}  # fmt: skip
_LTX = "comfy.ldm.lightricks.vae.causal_video_autoencoder"
_COSMOS: dict[str, Any] = {
    "z_channels": 16, "latent_channels": 16, "z_factor": 1, "resolution": 1024, "in_channels": 3, "out_channels": 3,
    "channels": 128, "channels_mult": [2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [32], "dropout": 0.0,
    "patch_size": 4, "num_groups": 1, "temporal_compression": 8, "spacial_compression": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Vae:
    """kind: core's class of the first_stage_model. settings: its arguments in core's loader.

    narrow: the VAE's classes, with settings that make it small and that core's loader fixes otherwise. Core reads only
        Wan 2.1's width from the weights, so a server on the CPU can load that one.
    known_by: tensors in its file by which core recognises it, and which core does not load.
    """

    kind: str
    settings: Mapping[str, Any]
    narrow: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    known_by: Mapping[str, Any] = field(default_factory=dict)


VAES = {
    "wan": Vae("comfy.ldm.wan.vae.WanVAE", _WAN, {"comfy.ldm.wan.vae.WanVAE": {"dim": 8}}),
    "wan22": Vae(
        "comfy.ldm.wan.vae2_2.WanVAE",
        {**_WAN, "dim": 160, "z_dim": 48},
        {"comfy.ldm.wan.vae2_2.WanVAE": {"dim": 16, "dec_dim": 16, "num_res_blocks": 1}},
    ),
    "ltx": Vae(
        f"{_LTX}.VideoVAE",
        {"version": 2},  # core derives it from the width
        {f"{_LTX}.VideoVAE": {"version": 2}, **{f"{_LTX}.{part}": {"base_channels": 16} for part in _BOTH}},
    ),
    "hunyuan": Vae(
        "comfy.ldm.models.autoencoder.AutoencoderKL",
        {"ddconfig": _KL, "embed_dim": 16},
        {f"comfy.ldm.modules.diffusionmodules.model.{part}": {"ch": 32, "num_res_blocks": 1} for part in _BOTH},
    ),
    "hunyuan15": Vae(
        "comfy.ldm.models.autoencoder.AutoencodingEngine", _REFINED,
        {f"{_REFINER}.{part}": {"block_out_channels": [32, 32, 64, 64, 64], "num_res_blocks": 1} for part in _BOTH},
    ),
    "h3": Vae(
        "comfy.ldm.minimax.vae.MiniMaxH3VideoVAE", {},
        {
            "comfy.ldm.minimax.vae.MiniMaxH3VideoVAE": {"ch": 32, "num_res_blocks": 1},
            "comfy.ldm.minimax.vae.ViT3DDecoder": {"num_layers": 2, "heads": 2},
        },
    ),
    "cosmos": Vae(
        "comfy.ldm.cosmos.vae.CausalContinuousVideoTokenizer", _COSMOS,
        {"comfy.ldm.cosmos.vae.CausalContinuousVideoTokenizer": {"channels": 16, "num_res_blocks": 1}},
        {"decoder.unpatcher3d.wavelets": torch.zeros(2)},
    ),
    "mochi": Vae(
        "comfy.ldm.genmo.vae.model.VideoVAE", {},
        {f"comfy.ldm.genmo.vae.model.{part}": {"base_channels": 32} for part in _BOTH},
    ),
}  # fmt: skip


def weights_of(name: str, is_small: bool) -> dict[str, Any]:
    """Random weights that preserve the variance of activations. is_small: of the narrow VAE."""
    torch.manual_seed(0)
    with _narrow(name, is_small):  # on the CPU: Cosmos' init reads numbers, core leaves weights uninitialised
        weights = _kind(VAES[name].kind)(**VAES[name].settings).state_dict()
    return {key: _random(key, weight.shape) for key, weight in (weights | VAES[name].known_by).items()}


def loaded_vae(name: str, is_small: bool) -> Any:
    """A comfy.sd.VAE, whose class core detects from random weights."""
    import comfy.sd

    weights = weights_of(name, is_small)
    with _narrow(name, is_small):
        return comfy.sd.VAE(sd=weights)


def _random(name: str, shape: Any) -> Any:
    if len(shape) >= 2 and not name.endswith(("gamma", "bias")):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return (torch.randn(shape, device=device) * math.prod(shape[1:]) ** -0.5).cpu()
    return torch.zeros(shape) if name.endswith(("bias", "mean-of-means")) else torch.ones(shape)


@contextlib.contextmanager
def _narrow(name: str, is_small: bool) -> Iterator[None]:
    """Inside, core builds the VAE with fewer channels if `is_small`."""
    with contextlib.ExitStack() as patched:
        for path, settings in VAES[name].narrow.items() if is_small else ():
            patched.enter_context(mock.patch(path, _with(_kind(path), settings)))
        yield


def _with(kind: Any, settings: Mapping[str, Any]) -> Any:
    return lambda *args, **given: kind(*args, **{**given, **settings})


def _kind(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
