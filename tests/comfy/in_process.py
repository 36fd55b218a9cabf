"""Real ComfyUI in this process: its UNetModel and its samplers, without a server."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from scripts.setup import comfyui

ROOT = Path(__file__).resolve().parents[2]
PACK = "resolute_on_comfyui"  # beside the one on a server
TOLERANCE = 1e-5

# Three levels, so that odd latents are halved twice (90 -> 45 -> 23). Attention where that is cheap on a CPU, and equal
# widths, so that few distinct blocks have to be compiled; two channels to each group of a norm, or it would undo what
# the time embedding adds.
UNET: dict[str, Any] = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 64, "num_res_blocks": [1, 1, 1],
    "channel_mult": [1, 1, 1], "transformer_depth": [0, 1, 1], "transformer_depth_output": [0, 0, 1, 1, 1, 1],
    "transformer_depth_middle": 1, "use_spatial_transformer": True, "legacy": False, "context_dim": 16,
    "num_heads": 4, "num_head_channels": -1,
}  # fmt: skip
HIGHEST_DEPTH = 5


@functools.cache
def load() -> SimpleNamespace:
    """ComfyUI's modules and ours, imported once per session."""
    folder = str(comfyui.ensure(ROOT, comfyui.TARGET))
    sys.path.append(folder)
    try:
        import comfy.cli_args as cli

        cli.args.cpu = True
        cli.args.use_pytorch_cross_attention = True  # sub-quadratic attention, the CPU's default, slices by free memory
        import comfy.ldm.modules.diffusionmodules.openaimodel as openaimodel
        import comfy.ops
        import comfy.patcher_extension
        import comfy.sample
        import comfy.samplers
        import comfy_execution.progress  # noqa: F401 (adapters import it later, when ComfyUI is no longer on the path)
        from comfy_api.torch_helpers import set_torch_compile_wrapper

        # Where regions are kept over restarts; nothing is kept here.
        folders = ModuleType("folder_paths")
        folders.get_system_user_directory = str  # type: ignore[attr-defined]
        folders.get_user_directory = str  # type: ignore[attr-defined]
        pack = _package(PACK, ROOT)
        tiny = _package("resolute_tiny_models", ROOT / "tests" / "pack")
        sys.modules["folder_paths"] = folders
        with mock.patch.dict(os.environ, {"RESOLUTE_STORE": "0"}):
            importlib.import_module(f"{pack}.nodes.adapters.process.runtime").cache()
        importlib.import_module(
            f"{pack}.nodes.adapters.patch.compiled_forward"
        )  # while ComfyUI's folder is in the path
        del sys.modules["folder_paths"]
        return SimpleNamespace(
            comfy=comfy,
            unet_class=openaimodel.UNetModel,
            torch_compile=set_torch_compile_wrapper,
            ours=lambda name: importlib.import_module(f"{pack}.nodes.adapters.{name}"),
            inside=lambda name: importlib.import_module(f"{pack}.compile_cache.{name}"),
            roles=importlib.import_module(f"{pack}.compile_cache.keys").Role,
            tiny_model=importlib.import_module(f"{tiny}.models").ResoluteTestTinyModel,
            reference=importlib.import_module(f"{tiny}.deepcache_loop"),
        )
    finally:
        sys.path.remove(folder)


def make_unet(core: SimpleNamespace, **changes: Any) -> Any:
    """A UNetModel with random weights that keep a signal's variance."""
    torch.manual_seed(0)
    operations = core.comfy.ops.disable_weight_init
    unet = core.unet_class(**{**UNET, **changes}, dtype=torch.float32, device="cpu", operations=operations)
    for name, weight in unet.eval().requires_grad_(False).named_parameters():
        if weight.ndim > 1:
            weight.copy_(torch.randn_like(weight) * weight[0].numel() ** -0.5)
        else:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
    return unet


def inputs(width: int, height: int, seed: int = 0, batch: int = 1) -> dict[str, torch.Tensor]:
    """Of one call: pixels -> latent, timesteps and context."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn((batch, 4, height // 8, width // 8), generator=generator),
        "timesteps": torch.full((batch,), 500.0 - 40 * seed),
        "context": torch.randn((batch, 7, 16), generator=generator),
    }


def residuals(unet: Any, width: int, height: int, seed: int = 3) -> dict[str, list[Any]]:
    """ControlNet residuals for each skip connection, as core hands them over: the one of block 0 last."""
    shapes: list[torch.Size] = []

    def note(h: torch.Tensor, options: Any) -> torch.Tensor:
        shapes.append(h.shape)
        return h

    options = {"patches": {"input_block_patch": [note]}}
    unet._forward(**inputs(width, height), transformer_options=options)
    generator = torch.Generator().manual_seed(seed)
    skips = [torch.randn(shape, generator=generator) * 0.3 for shape in shapes]
    return {"input": [], "middle": [torch.randn(shapes[-1], generator=generator) * 0.3], "output": skips}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def _package(name: str, folder: Path) -> str:
    """A package whose modules can be imported one by one; what its `__init__` would do is left out."""
    module = ModuleType(name)
    module.__path__ = [str(folder)]
    sys.modules[name] = module
    return name
