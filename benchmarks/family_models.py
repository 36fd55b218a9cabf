"""Transformers of real width with fewer layers and random weights: settings, files, and the inputs of a step."""

from __future__ import annotations

import argparse
import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts.places import ROOT
from scripts.setup import command

from .weight_formats import file_of, save


class Family(NamedTuple):
    """network: below `comfy.ldm`. settings: of the network. layers: the settings with the number of its layers.

    tokens, width, pooled: of the text. latent: the node that makes the latent. frames: of a video, 1 for an image.
    grid: the network's input channels, and the pixels per side of a latent cell. sizes: width and height in pixels.
    cells: the latent's frames for a number of frames; None if the latent has no frame dimension. sound: the sound's
    latent frames per second, 0 without sound. padding: masked tokens of the text; 0 without a mask.
    """

    network: str
    settings: dict[str, Any]
    layers: tuple[str, ...]
    tokens: int
    width: int
    pooled: int
    latent: str
    frames: int
    grid: tuple[int, int]
    cells: Callable[[int], int] | None
    sizes: tuple[tuple[int, int], ...]
    sound: int = 0
    padding: int = 0


def _every(count: int) -> Callable[[int], int]:
    """A latent's number of frames: one for the first frame, and one for each `count` later frames."""
    return lambda frames: (frames - 1) // count + 1


def _minimax_frames(frames: int) -> int:
    """A latent's number of frames, as in core's EmptyMiniMaxH3LatentAV, for 17 k + 5 frames."""
    return (frames - 5) // 17 * 5 + 2


_IMAGES = ((1024, 1024), (720, 960), (1536, 1024))
_SMALL = ((64, 64), (96, 64))  # for a run on the CPU
# Widths for a run on the CPU, of families whose width ComfyUI's detection reads from the weights.
_NARROW = {
    "flux": {"hidden_size": 256, "num_heads": 2},
    "klein": {"hidden_size": 256, "num_heads": 2},
    "wan": {"dim": 256, "ffn_dim": 1024, "num_heads": 2},
}
FAMILIES = {
    "flux": Family(
        "flux.model.Flux",
        {
            "image_model": "flux", "in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 4096,
            "hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24, "depth": 10, "depth_single_blocks": 20,
            "axes_dim": [16, 56, 56], "theta": 10000, "txt_ids_dims": [], "patch_size": 2, "qkv_bias": True,
            "guidance_embed": True,
        },
        ("depth", "depth_single_blocks"), 512, 4096, 768, "EmptySD3LatentImage", 1, (16, 8), None, _IMAGES,
    ),
    "klein": Family(
        "flux.model.Flux",
        {
            "image_model": "flux2", "in_channels": 128, "out_channels": 128, "vec_in_dim": None, "context_in_dim": 7680,
            "hidden_size": 3072, "mlp_ratio": 3.0, "num_heads": 24, "depth": 5, "depth_single_blocks": 20,
            "axes_dim": [32, 32, 32, 32], "theta": 2000, "txt_ids_dims": [3], "patch_size": 1, "qkv_bias": False,
            "guidance_embed": False, "global_modulation": True, "mlp_silu_act": True, "ops_bias": False,
            "default_ref_method": "index", "ref_index_scale": 10.0,
        },
        ("depth", "depth_single_blocks"), 512, 7680, 0, "EmptyFlux2LatentImage", 1, (128, 16), None, _IMAGES,
    ),
    "z-image": Family(
        "lumina.model.NextDiT",
        {
            "patch_size": 2, "in_channels": 16, "dim": 3840, "n_layers": 15, "n_refiner_layers": 2, "n_heads": 30,
            "n_kv_heads": 30, "multiple_of": 256, "ffn_dim_multiplier": 8 / 3, "qk_norm": True, "cap_feat_dim": 2560,
            "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512], "rope_theta": 256.0, "z_image_modulation": True,
            "time_scale": 1000.0,
        },
        ("n_layers",), 128, 2560, 0, "EmptySD3LatentImage", 1, (16, 8), None, _IMAGES,
    ),
    "qwen-image": Family(
        "qwen_image.model.QwenImageTransformer2DModel", {"in_channels": 64, "num_layers": 12},
        ("num_layers",), 128, 3584, 0, "EmptySD3LatentImage", 1, (16, 8), _every(4), _IMAGES,
    ),
    "wan": Family(
        "wan.model.WanModel",
        {
            "model_type": "t2v", "in_dim": 16, "dim": 1536, "ffn_dim": 8960, "freq_dim": 256, "text_dim": 4096,
            "out_dim": 16, "num_heads": 12, "num_layers": 30, "cross_attn_norm": True,
        },
        ("num_layers",), 512, 4096, 0, "EmptyHunyuanLatentVideo", 33, (16, 8), _every(4),
        ((832, 480), (480, 832), (624, 624)),
    ),
    "ltx": Family(
        "lightricks.model.LTXVModel", {"num_layers": 28}, ("num_layers",), 256, 4096, 0, "EmptyLTXVLatentVideo", 97,
        (128, 32), _every(8), ((768, 512), (512, 768), (1216, 704)), padding=128,
    ),
    "krea2": Family(
        "krea2.model.SingleStreamDiT", {"layers": 5}, ("layers",), 256, 30720, 0, "EmptySD3LatentImage", 1, (16, 8),
        _every(4), _IMAGES,
    ),
    "minimax-h3": Family(
        "minimax.model.MiniMaxH3Model", {"num_layers": 3}, ("num_layers",), 256, 5120, 0, "EmptyMiniMaxH3LatentAV",
        22, (24, 16), _minimax_frames, ((1344, 768), (768, 1344), (960, 960)), 40,
    ),
    "hunyuan-1.5": Family(
        "hunyuan_video.model.HunyuanVideo",
        {
            "image_model": "hunyuan_video", "in_channels": 65, "out_channels": 32, "vec_in_dim": None,
            "context_in_dim": 3584, "hidden_size": 2048, "mlp_ratio": 4.0, "num_heads": 16, "depth": 18,
            "depth_single_blocks": 0, "axes_dim": [16, 56, 56], "theta": 256, "patch_size": [1, 1, 1],
            "qkv_bias": True, "guidance_embed": False, "byt5": True, "meanflow": False,
            "use_cond_type_embedding": True, "vision_in_dim": 1152, "meanflow_sum": True,
        },
        ("depth",), 256, 3584, 768, "EmptyHunyuanVideo15Latent", 33, (65, 16), _every(4),
        ((848, 480), (480, 848), (640, 640)),
    ),
}  # fmt: skip


def family(name: str, is_small: bool = False) -> Family:
    """A family by name. is_small: one layer of each kind, small sizes and widths, so that a CPU runs it in seconds."""
    found = FAMILIES[name]
    if not is_small:
        return found
    settings = {**found.settings, **dict.fromkeys(found.layers, 1), **_NARROW.get(name, {})}
    return found._replace(
        settings=settings, sizes=_SMALL, frames=min(found.frames, 5), tokens=16, padding=found.padding and 8
    )


def ensure(setup: command.Setup, models: Path, names: Sequence[str], is_small: bool) -> None:
    """Make the missing files in a process with torch and ComfyUI. models: a folder in ComfyUI's layout.

    names: of families, optionally with a format, as in flux:fp8-scaled.
    """
    for folder in ("checkpoints", "diffusion_models", "loras"):
        (models / folder).mkdir(parents=True, exist_ok=True)
    missing = [name for name in dict.fromkeys(names) if not path_of(models, name).with_suffix(".json").is_file()]
    if missing:
        child = [str(setup.python), "-m", "benchmarks.family_models", str(models), str(setup.comfyui), *missing]
        subprocess.run([*child, *(["--cpu"] if is_small else [])], cwd=ROOT, check=True)


def path_of(models: Path, name: str) -> Path:
    """The file of a model in its format. A JSON file beside it marks it as complete."""
    family, _, form = name.partition(":")
    return models / "diffusion_models" / file_of(family, form)


# --- in a process with torch and ComfyUI -------------------------------------------------------------------------


def main() -> None:
    """Write models with the file names and settings of `ensure`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("comfyui", type=Path)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--cpu", action="store_true", help="small models")
    options = parser.parse_args()
    sys.path.insert(0, str(options.comfyui))
    sys.argv = sys.argv[:1]  # ComfyUI reads the command line
    importlib.import_module("comfy.cli_args").args.cpu = options.cpu
    forms: dict[str, dict[str, Path]] = {}
    for name in options.names:
        plain, _, form = name.partition(":")
        forms.setdefault(plain, {})[form] = path_of(options.folder, name)
    for name, outs in forms.items():
        _make(name, family(name, options.cpu), outs, "cpu" if options.cpu else "cuda")


def _make(name: str, family: Family, outs: Mapping[str, Path], device: str) -> None:
    """Write the model's weights in each format. outs: the files by format."""
    import torch

    operations = importlib.import_module("comfy.ops").manual_cast
    module, _, kind = family.network.rpartition(".")
    network = getattr(importlib.import_module(f"comfy.ldm.{module}"), kind)
    model = network(**family.settings, dtype=torch.bfloat16, device=device, operations=operations)
    model = model.to(device).eval().requires_grad_(False)  # LTX makes its table on the CPU
    generator = torch.Generator(device).manual_seed(0)
    weights = model.state_dict()
    for key, weight in weights.items():  # random weights that preserve the scale of activations
        if weight.ndim > 1:
            weight.normal_(generator=generator).mul_(0.5 * weight[0].numel() ** -0.5)
        else:
            weight.fill_(1.0 if key.endswith(("weight", "scale")) else 0.0)
    for form, out in outs.items():
        save(weights, form, out)
        out.with_suffix(".json").write_text("{}", "utf-8")
    print(f"made {name}: {sum(weight.numel() for weight in weights.values()) / 1e9:.1f} billion weights", flush=True)


def step_inputs(model: Any, family: Family, width: int, height: int) -> dict[str, Any]:
    """Make the arguments of a step, by name. width, height: pixels."""
    import torch

    like = {"dtype": torch.bfloat16, "device": next(model.parameters()).device}
    channels, pixels = family.grid
    frames = (family.cells(family.frames),) if family.cells else ()
    takes = inspect.signature(type(model).forward).parameters
    x: Any = torch.zeros((1, channels, *frames, height // pixels, width // pixels), **like)
    if family.sound:
        x = [x, torch.zeros((1, 32, 2, round(family.frames / 24 * family.sound)), **like)]
    mask = torch.ones((1, family.tokens), dtype=torch.int64, device=like["device"])
    given: dict[str, Any] = {
        "x": x,
        next(each for each in ("timestep", "timesteps", "t") if each in takes): torch.full((1,), 0.5, **like).float(),
        "context": torch.zeros((1, family.tokens, family.width), **like),
        "num_tokens": family.tokens,
        "y": torch.zeros((1, family.pooled), **like) if family.pooled else None,
        "guidance": torch.full((1,), 3.5, **like),
        "attention_mask": mask if family.padding else None,
    }
    given = {key: value for key, value in given.items() if key in takes}
    return {key: value for key, value in given.items() if value is not None or takes[key].default is takes[key].empty}


if __name__ == "__main__":
    main()
