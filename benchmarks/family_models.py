"""Transformers of real width and fewer layers, with random weights: settings, files and work per step."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple


class Family(NamedTuple):
    """network: below `comfy.ldm`. settings: of the network. layers: the settings that count its layers.

    tokens, width, pooled: of the text. latent: the node that makes the latent. frames: of a video, 1 for an image.
    latent_dims: dimensions of the latent. sizes: width and height.
    """

    network: str
    settings: dict[str, Any]
    layers: tuple[str, ...]
    tokens: int
    width: int
    pooled: int
    latent: str
    frames: int
    latent_dims: int
    sizes: tuple[tuple[int, int], ...]


_IMAGES = ((1024, 1024), (720, 960), (1536, 1024))
_SMALL = ((64, 64), (96, 64))  # for a run on the CPU
FAMILIES = {
    "flux": Family(
        "flux.model.Flux",
        {
            "image_model": "flux", "in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 4096,
            "hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24, "depth": 10, "depth_single_blocks": 20,
            "axes_dim": [16, 56, 56], "theta": 10000, "txt_ids_dims": [], "patch_size": 2, "qkv_bias": True,
            "guidance_embed": True,
        },
        ("depth", "depth_single_blocks"), 512, 4096, 768, "EmptySD3LatentImage", 1, 4, _IMAGES,
    ),
    "z-image": Family(
        "lumina.model.NextDiT",
        {
            "patch_size": 2, "in_channels": 16, "dim": 3840, "n_layers": 15, "n_refiner_layers": 2, "n_heads": 30,
            "n_kv_heads": 30, "multiple_of": 256, "ffn_dim_multiplier": 8 / 3, "qk_norm": True, "cap_feat_dim": 2560,
            "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512], "rope_theta": 256.0, "z_image_modulation": True,
            "time_scale": 1000.0,
        },
        ("n_layers",), 128, 2560, 0, "EmptySD3LatentImage", 1, 4, _IMAGES,
    ),
    "qwen-image": Family(
        "qwen_image.model.QwenImageTransformer2DModel", {"in_channels": 64, "num_layers": 12},
        ("num_layers",), 128, 3584, 0, "EmptySD3LatentImage", 1, 5, _IMAGES,
    ),
    "wan": Family(
        "wan.model.WanModel",
        {
            "model_type": "t2v", "in_dim": 16, "dim": 1536, "ffn_dim": 8960, "freq_dim": 256, "text_dim": 4096,
            "out_dim": 16, "num_heads": 12, "num_layers": 30, "cross_attn_norm": True,
        },
        ("num_layers",), 512, 4096, 0, "EmptyHunyuanLatentVideo", 33, 5, ((832, 480), (480, 832), (624, 624)),
    ),
}  # fmt: skip


def family(name: str, is_small: bool = False) -> Family:
    """is_small: one layer of each kind, and small sizes, so that the CPU runs it in seconds."""
    found = FAMILIES[name]
    if not is_small:
        return found
    settings = {**found.settings, **dict.fromkeys(found.layers, 1)}
    return found._replace(settings=settings, sizes=_SMALL, frames=min(found.frames, 5), tokens=16)


def file_of(name: str) -> str:
    return f"resolute-random-{name}.safetensors"


def floor_ms(file: Path, size: tuple[int, int], tera_operations_per_second: float) -> float:
    """Milliseconds of a step's matrix products and attention, at a speed. file: of the model."""
    work = json.loads(file.with_suffix(".json").read_text("utf-8"))
    return float(1000 * work[f"{size[0]}x{size[1]}"] / tera_operations_per_second)


# --- in a process with torch and ComfyUI -------------------------------------------------------------------------


def make_all(comfyui: Path, folder: Path, names: list[str], is_small: bool) -> None:
    """Write the models into a folder, each with its work per step beside it. is_small: on the CPU."""
    sys.path.insert(0, str(comfyui))
    sys.argv = sys.argv[:1]  # ComfyUI reads the command line
    importlib.import_module("comfy.cli_args").args.cpu = is_small
    for name in names:
        if not (folder / file_of(name)).with_suffix(".json").is_file():
            _make(name, family(name, is_small), folder / file_of(name), "cpu" if is_small else "cuda")


def _make(name: str, family: Family, out: Path, device: str) -> None:
    import safetensors.torch
    import torch

    operations = importlib.import_module("comfy.ops").manual_cast
    module, _, kind = family.network.rpartition(".")
    network = getattr(importlib.import_module(f"comfy.ldm.{module}"), kind)
    model = network(**family.settings, dtype=torch.bfloat16, device=device, operations=operations)
    model = model.eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    weights = model.state_dict()
    for key, weight in weights.items():  # random weights that keep a signal's size
        if weight.ndim > 1:
            weight.normal_(generator=generator).mul_(0.5 * weight[0].numel() ** -0.5)
        else:
            weight.fill_(1.0 if key.endswith(("weight", "scale")) else 0.0)
    work = {f"{width}x{height}": _tera_operations(model, family, width, height) for width, height in family.sizes}
    safetensors.torch.save_file({key: weight.cpu().contiguous() for key, weight in weights.items()}, str(out))
    out.with_suffix(".json").write_text(json.dumps(work), "utf-8")
    billions = sum(weight.numel() for weight in weights.values()) / 1e9
    print(f"made {name}: {billions:.1f} billion weights, 10^12 operations a step: {work}", flush=True)


def _tera_operations(model: Any, family: Family, width: int, height: int) -> float:
    """The floating-point operations of one step's matrix products and attention, in 10^12."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    like = {"dtype": torch.bfloat16, "device": next(model.parameters()).device}
    frames = ((family.frames - 1) // 4 + 1,) if family.latent_dims == 5 else ()
    takes = inspect.signature(type(model).forward).parameters
    given: dict[str, Any] = {
        "x": torch.zeros((1, 16, *frames, height // 8, width // 8), **like),
        next(each for each in ("timestep", "timesteps", "t") if each in takes): torch.full((1,), 0.5, **like).float(),
        "context": torch.zeros((1, family.tokens, family.width), **like),
        "num_tokens": family.tokens,
        "y": torch.zeros((1, family.pooled), **like) if family.pooled else None,
        "guidance": torch.full((1,), 3.5, **like),
    }
    with torch.inference_mode(), FlopCounterMode(display=False) as counted:
        model(**{key: value for key, value in given.items() if key in takes and value is not None})
    return float(counted.get_total_flops() / 1e12)
