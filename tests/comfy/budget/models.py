"""Models of core's own classes at their real sizes, without memory for their weights, loaded by core's DynamicVRAM."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

GPU = torch.device("cpu")  # it stands for the GPU
HOST = "meta"
_SMALL = 16 << 10  # bytes; see `ModelPatcherDynamic.load`

_SDXL: dict[str, Any] = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320, "use_spatial_transformer": True,
    "use_checkpoint": False, "legacy": False, "context_dim": 2048, "num_head_channels": 64, "num_heads": -1,
    "use_linear_in_transformer": True, "num_classes": "sequential", "adm_in_channels": 2816,
    "num_res_blocks": [2, 2, 2], "channel_mult": [1, 2, 4], "transformer_depth": [0, 0, 2, 2, 10, 10],
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10], "transformer_depth_middle": 10,
}  # fmt: skip
_FLUX: dict[str, Any] = {
    "image_model": "flux", "in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 4096,
    "hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24, "depth": 19, "depth_single_blocks": 38,
    "axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 2, "txt_ids_dims": [], "qkv_bias": True,
    "guidance_embed": True,
}  # fmt: skip
_WAN: dict[str, Any] = {
    "image_model": "wan2.1", "model_type": "t2v", "dim": 5120, "out_dim": 16, "num_heads": 40, "ffn_dim": 13824,
    "num_layers": 40, "patch_size": (1, 2, 2), "freq_dim": 256, "window_size": (-1, -1), "qk_norm": True,
    "cross_attn_norm": True, "eps": 1e-6, "in_dim": 16,
}  # fmt: skip

# The same models with about 500 and 2,000 modules.
SMALLER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SDXL": (
        {"transformer_depth": [0, 0, 1, 1, 1, 1], "transformer_depth_output": [0, 0, 0, 1, 1, 1, 1, 1, 1],
         "transformer_depth_middle": 1},
        {},
    ),
    "Wan 2.1 14B": ({"num_layers": 22}, {"num_layers": 91}),
}  # fmt: skip
Call = tuple[tuple[int, ...], dict[str, tuple[int, ...]]]  # shapes of the latent and of the other tensors


def _flux_call(size: int) -> Call:
    return (1, 16, size, size), {"timestep": (1,), "context": (1, 256, 4096), "y": (1, 768), "guidance": (1,)}


MODELS: dict[str, tuple[str, dict[str, Any], torch.dtype, Callable[[int], Call]]] = {
    "SDXL": (
        "SDXL",
        _SDXL,
        torch.float16,
        lambda size: ((2, 4, size, size), {"timesteps": (2,), "context": (2, 77, 2048), "y": (2, 2816)}),
    ),
    "Flux": ("Flux", _FLUX, torch.bfloat16, _flux_call),
    "Wan 2.1 14B": (
        "WAN21_T2V",
        _WAN,
        torch.bfloat16,
        lambda size: ((1, 16, 9, size, size), {"timestep": (1,), "context": (1, 512, 4096)}),
    ),
}


def make(name: str, **changes: Any) -> Any:
    """A patcher of DynamicVRAM around a model, with a LoRA. changes: of its settings, as {"depth": 2}."""
    kind, settings, dtype, _ = MODELS[name]
    config = getattr(importlib.import_module("comfy.supported_models"), kind)({**settings, **changes})
    config.unet_config = {**config.unet_config, **settings, **changes}
    config.set_inference_dtype(dtype, None)
    with torch.inference_mode(False):
        model = config.get_model({}, "", device="meta")
        for part in model.modules():
            _give_contents(part)
    patchers = importlib.import_module("comfy.model_patcher")

    class Paging(patchers.ModelPatcherDynamic):  # type: ignore[misc, name-defined]
        def __new__(cls, *args: Any, **settings: Any) -> Any:
            return object.__new__(cls)  # core gives the CPU a patcher without DynamicVRAM

        def _vbar_get(self, create: bool = False) -> Any:
            """Core's reservation of a device with a number: the CPU has none."""
            self.load_device = torch.device("cpu", 0)
            try:
                return super()._vbar_get(create)
            finally:
                self.load_device = GPU

    patcher = Paging(model, load_device=GPU, offload_device=torch.device("cpu"))
    changed = [name for name, weight in model.named_parameters() if weight.ndim == 2 and weight.nbytes > _SMALL]
    change = {name: ("diff", (model.get_parameter(name),)) for name in changed[::4]}
    assert len(patcher.add_patches(change)) == len(change) > 0, "the LoRA fits no weight"
    return patcher


def call_of(name: str, size: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """The latent and the other arguments of one call, as core passes them."""
    *_, dtype, shapes = MODELS[name]
    latent, others = shapes(size)
    options = {
        "cond_or_uncond": [1, 0], "uuids": [1, 2], "sigmas": torch.ones(1), "sample_sigmas": torch.ones(21),
        "patches": {}, "wrappers": {}, "callbacks": {},
    }  # fmt: skip
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, shape in others.items()}
    return torch.zeros(latent, dtype=dtype), {**tensors, "transformer_options": options}


def _give_contents(part: torch.nn.Module) -> None:
    """Weights that a load puts onto the device are zeros. Of the others one number stands for all, as in a file that
    nobody reads.
    """
    size = sum(weight.nbytes for weight in (*part._parameters.values(), *part._buffers.values()) if weight is not None)
    is_put = size <= _SMALL or not hasattr(part, "comfy_cast_weights")
    for own in (part._parameters, part._buffers):
        for name, weight in own.items():
            if weight is None or weight.device.type != HOST:
                continue
            made = torch.zeros(weight.shape if is_put else (), dtype=weight.dtype).expand(weight.shape)
            own[name] = torch.nn.Parameter(made, requires_grad=False) if own is part._parameters else made
