"""VAEs of real width for `benchmarks.video`, with random weights; narrow ones for a run on the CPU."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

_KL: dict[str, Any] = {
    "double_z": True, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128, "ch_mult": [1, 2, 4, 4],
    "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0, "z_channels": 16,
}  # fmt: skip
_PARTS = "comfy.ldm.modules.diffusionmodules.model"
_REFINER = "comfy.ldm.hunyuan_video.vae_refiner"
_REFINED: dict[str, Any] = {
    "block_out_channels": [128, 256, 512, 1024, 1024], "in_channels": 3, "out_channels": 3, "num_res_blocks": 2,
    "ffactor_spatial": 16, "ffactor_temporal": 4, "downsample_match_channel": True, "upsample_match_channel": True,
    "z_channels": 32,
}  # fmt: skip
_WAN: dict[str, Any] = {
    "dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "temperal_downsample": [False, True, True]
}  # fmt: skip
_LTX = "comfy.ldm.lightricks.vae.causal_video_autoencoder"
_COSMOS: dict[str, Any] = {
    "z_channels": 16, "latent_channels": 16, "z_factor": 1, "resolution": 1024, "in_channels": 3, "out_channels": 3,
    "channels": 128, "channels_mult": [2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [32], "dropout": 0.0,
    "patch_size": 4, "num_groups": 1, "temporal_compression": 8, "spacial_compression": 8,
}  # fmt: skip


def _engine(where: str, settings: dict[str, Any], regularizer: str) -> dict[str, Any]:
    """The settings of core's AutoencodingEngine around an encoder and a decoder."""
    return {
        "regularizer_config": {"target": f"comfy.ldm.models.autoencoder.{regularizer}"},
        "encoder_config": {"target": f"{where}.Encoder", "params": settings},
        "decoder_config": {"target": f"{where}.Decoder", "params": settings},
    }


@dataclass(frozen=True)
class Vae:
    """kind: core's class of the first_stage_model. settings: of it, as core's loader has them.

    narrow: classes that this VAE is made of, with settings that make it small, which core's loader fixes. Only Wan
        2.1's width is read from the weights, so a server on the CPU can load it.
    known_by: tensors of its file that core looks for, and does not load.
    """

    kind: str
    settings: Mapping[str, Any]
    narrow: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    known_by: Mapping[str, Any] = field(default_factory=dict)


_NARROW_KL = {f"{_PARTS}.{part}": {"ch": 32, "num_res_blocks": 1} for part in ("Encoder", "Decoder")}
_NARROW_REFINED = {
    f"{_REFINER}.{part}": {"block_out_channels": [32, 32, 64, 64, 64], "num_res_blocks": 1}
    for part in ("Encoder", "Decoder")
}
_ENGINE = "comfy.ldm.models.autoencoder.AutoencodingEngine"
VAES = {
    "wan": Vae("comfy.ldm.wan.vae.WanVAE", _WAN, {"comfy.ldm.wan.vae.WanVAE": {"dim": 8}}),
    "wan22": Vae(
        "comfy.ldm.wan.vae2_2.WanVAE",
        {**_WAN, "dim": 160, "z_dim": 48},
        {"comfy.ldm.wan.vae2_2.WanVAE": {"dim": 16, "dec_dim": 16, "num_res_blocks": 1}},
    ),
    "ltx": Vae(
        f"{_LTX}.VideoVAE",
        {"version": 2},  # which core tells by the width
        {
            f"{_LTX}.VideoVAE": {"version": 2},
            f"{_LTX}.Encoder": {"base_channels": 16},
            f"{_LTX}.Decoder": {"base_channels": 16},
        },
    ),
    "hunyuan": Vae(
        "comfy.ldm.models.autoencoder.AutoencoderKL",
        {"ddconfig": {**_KL, "conv3d": True, "time_compress": 4}, "embed_dim": 16},
        _NARROW_KL,
    ),
    "hunyuan15": Vae(_ENGINE, _engine(_REFINER, _REFINED, "EmptyRegularizer"), _NARROW_REFINED),
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
        {f"comfy.ldm.genmo.vae.model.{part}": {"base_channels": 32} for part in ("Encoder", "Decoder")},
    ),
    "sdxl": Vae(
        "comfy.ldm.models.autoencoder.AutoencoderKL", {"ddconfig": {**_KL, "z_channels": 4}, "embed_dim": 4}, _NARROW_KL
    ),
    "flux": Vae(_ENGINE, _engine(_PARTS, _KL, "DiagonalGaussianRegularizer"), _NARROW_KL),
}  # fmt: skip
VAES["qwen"] = VAES["wan"]


def weights_of(name: str, is_small: bool) -> dict[str, Any]:
    """Random weights that keep a signal's variance. is_small: of the narrow VAE."""
    torch.manual_seed(0)
    with _narrow(name, is_small):  # on the CPU, where core leaves weights as they come: Cosmos' reads numbers
        weights = _kind(VAES[name].kind)(**VAES[name].settings).state_dict()
    return {key: _random(key, weight.shape) for key, weight in (weights | VAES[name].known_by).items()}


def save(name: str, out: Path, is_small: bool) -> None:
    """Write a VAE in bf16, and beside it the file that tells `family_models` that it is complete."""
    import safetensors.torch

    weights = {key: value.to(torch.bfloat16).contiguous() for key, value in weights_of(name, is_small).items()}
    safetensors.torch.save_file(weights, str(out))
    out.with_suffix(".json").write_text("{}", "utf-8")


def loaded_vae(name: str, is_small: bool) -> Any:
    """A comfy.sd.VAE that core finds out from random weights."""
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
    """Inside, core makes the VAE with fewer channels."""
    with contextlib.ExitStack() as patched:
        for path, settings in VAES[name].narrow.items() if is_small else ():
            patched.enter_context(mock.patch(path, _with(_kind(path), settings)))
        yield


def _with(kind: Any, settings: Mapping[str, Any]) -> Any:
    return lambda *args, **given: kind(*args, **{**given, **settings})


def _kind(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
