"""Diffusion models of no family that Resolute knows."""

from __future__ import annotations

from typing import Any

import comfy.ldm.modules.diffusionmodules.openaimodel as openaimodel
import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import comfy.supported_models
import comfy.supported_models_base
import torch

from .models import ResoluteTestTinyModel
from .node import SEED, Node


class OneForward(torch.nn.Module):
    """Two convolutions and a timestep; computes in ``forward`` itself, like SD3."""

    def __init__(self, in_channels: int, dtype: Any, device: Any, operations: Any, **unused: Any) -> None:
        super().__init__()
        self.dtype = dtype
        self.enter = operations.Conv2d(in_channels, 16, 3, padding=1, dtype=dtype, device=device)
        self.leave = operations.Conv2d(16, in_channels, 3, padding=1, dtype=dtype, device=device)

    def forward(self, x: Any, timesteps: Any, context: Any = None, **unused: Any) -> Any:
        shift = torch.cos(timesteps / 1000)[:, None, None, None] + context.mean(dim=(1, 2))[:, None, None, None]
        return self.leave(torch.nn.functional.silu(self.enter(x) + shift))


class SplitForward(OneForward):
    """The same model with ``forward`` calling ``_forward``, like most of core's models."""

    def forward(self, x: Any, timesteps: Any, context: Any = None, **options: Any) -> Any:
        return self._forward(x, timesteps, context, **options)

    def _forward(self, x: Any, timesteps: Any, context: Any = None, **options: Any) -> Any:
        return super().forward(x, timesteps, context, **options)


SHAPES = {"one forward": OneForward, "split forward": SplitForward}


class ResoluteTestUnknownModel(Node):
    """A MODEL around one of ``SHAPES``, with random weights."""

    FUNCTION = "build"
    INPUTS = {"shape": (list(SHAPES),)}

    def build(self, shape: str) -> tuple[Any]:
        """Build it like the tiny model; it stays on the CPU, so it is never paged."""
        config = comfy.supported_models_base.BASE({"in_channels": 4})
        config.latent_format = comfy.supported_models.SD15.latent_format()
        config.set_inference_dtype(torch.float32, None)
        config.memory_usage_factor = 1.0
        device = comfy.model_management.unet_offload_device()
        model = comfy.model_base.BaseModel(config, device=device, unet_model=SHAPES[shape])
        generator = torch.Generator("cpu").manual_seed(0)
        for weight in model.diffusion_model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
        load_device = comfy.model_management.get_torch_device()
        return (comfy.model_patcher.ModelPatcher(model, load_device=load_device, offload_device=device),)


class CountingUNet(openaimodel.UNetModel):  # type: ignore[misc]
    """A UNet whose answer depends on how often it was called in this sampling run, as step caches of packs count."""

    calls = 0

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super()._forward(*args, **kwargs) * (1 + 0.01 * self.calls)


class ResoluteTestCountingModel(Node):
    """The tiny SD model with a class of this pack."""

    FUNCTION = "build"
    INPUTS = {"seed": SEED}

    def build(self, seed: int) -> tuple[Any]:
        patcher = ResoluteTestTinyModel().build(seed, "sd")[0]
        network = patcher.model.diffusion_model
        network.__class__ = CountingUNet

        def sample(executor: Any, *args: Any, **kwargs: Any) -> Any:
            network.calls = 0
            return executor(*args, **kwargs)

        patcher.add_wrapper(comfy.patcher_extension.WrappersMP.OUTER_SAMPLE, sample)
        return (patcher,)
