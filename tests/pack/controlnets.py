"""ControlNets for the test pack's tiny models, of each kind that core builds differently, and hint images for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import comfy.cldm.cldm
import comfy.controlnet
import comfy.model_management
import comfy.ops
import comfy.t2i_adapter.adapter
import torch

from .models import KINDS as TINY_KINDS
from .models import UNET
from .node import SEED, Node, whole
from .noise import fill

# A ControlNet is a copy of the UNet's first half.
NOT_COPIED = {"out_channels", "transformer_depth_output", "use_checkpoint", "num_head_channels", "adm_in_channels"}
CONFIG: dict[str, Any] = {name: value for name, value in UNET.items() if name not in NOT_COPIED}
CONFIG["hint_channels"] = 3
RANK = 4
UNION_TYPES = 6


def control_net(seed: int, adapt: Callable[[Any], None] | None = None, **changes: Any) -> Any:
    """Build a ControlNet like core's loader; `adapt` changes the network before it gets its weights."""
    load_device = comfy.model_management.get_torch_device()
    supported = [torch.float16, torch.float32]
    dtype = comfy.model_management.unet_dtype(device=load_device, supported_dtypes=supported)
    cast = comfy.model_management.unet_manual_cast(dtype, load_device)
    operations = comfy.ops.pick_operations(dtype, cast)
    device = comfy.model_management.unet_offload_device()
    model = comfy.cldm.cldm.ControlNet(**{**CONFIG, **changes}, operations=operations, dtype=dtype, device=device)
    if adapt is not None:
        adapt(model)
    model.load_state_dict(fill(model, seed))
    return comfy.controlnet.ControlNet(model, load_device=load_device, manual_cast_dtype=cast)


def union(seed: int) -> Any:
    """A ControlNet for several types of hints. Core builds these parts with the 320 channels of a real UNet."""

    def adapt(model: Any) -> None:
        channels, dtype = model.model_channels, model.dtype
        options = {"dtype": dtype, "operations": comfy.ops.manual_cast}
        model.task_embedding = torch.nn.Parameter(torch.empty((UNION_TYPES, channels), dtype=dtype))
        model.transformer_layes = torch.nn.Sequential(comfy.cldm.cldm.ResBlockUnionControlnet(channels, 4, **options))
        model.spatial_ch_projs = comfy.ops.manual_cast.Linear(channels, channels, dtype=dtype)

    return control_net(seed, adapt, union_controlnet_num_control_type=UNION_TYPES)


def t2i_adapter(seed: int) -> Any:
    """A T2I adapter with two features, for the tiny UNet's second and third level.

    Its features begin at an eighth of the hint's side, so the hint has four pixels per latent cell instead of eight.
    """
    model = comfy.t2i_adapter.adapter.Adapter(
        channels=[32, 64], nums_rb=1, cin=3 * 8 * 8, ksize=1, sk=True, use_conv=False, xl=False
    )
    model.load_state_dict(fill(model, seed))
    return comfy.controlnet.T2IAdapter(model, model.input_channels, 4, "nearest-exact")


def control_lora(seed: int) -> Any:
    """A ControlLora: the weights that a ControlNet adds to the UNet, and low-rank changes of the UNet's weights."""
    whole = fill(comfy.cldm.cldm.ControlNet(**CONFIG, operations=comfy.ops.disable_weight_init), seed)
    added = ("zero_convs.", "middle_block_out.", "input_hint_block.")
    weights = {name: weight for name, weight in whole.items() if name.startswith(added)}
    generator = torch.Generator("cpu").manual_seed(seed)
    for name, weight in whole.items():
        if weight.ndim < 2 or name.startswith(added):
            continue
        place, fan_in = name.removesuffix(".weight"), math.prod(weight.shape[1:])
        weights[f"{place}.up"] = torch.randn((weight.shape[0], RANK), generator=generator) * 0.5
        weights[f"{place}.down"] = torch.randn((RANK, fan_in), generator=generator) * 0.5 * fan_in**-0.5
    return comfy.controlnet.ControlLora({"lora_controlnet": torch.tensor([]), **weights})


KINDS: dict[str, Callable[[int], Any]] = {
    "sd": control_net,
    "sdxl": lambda seed: control_net(seed, **TINY_KINDS["sdxl"]),
    "union": union,
    "t2i adapter": t2i_adapter,
    "control lora": control_lora,
}


class ResoluteTestControlNet(Node):
    """A CONTROL_NET of one of ``KINDS``, with random weights."""

    RETURN_TYPES = ("CONTROL_NET",)
    FUNCTION = "build"
    INPUTS = {"kind": (list(KINDS),), "seed": SEED}

    def build(self, kind: str, seed: int) -> tuple[Any]:
        return (KINDS[kind](seed),)


class ResoluteTestHint(Node):
    """A hint image for a ControlNet: coloured patches of 8x8 pixels."""

    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "build"
    INPUTS = {"seed": SEED, **dict.fromkeys(("width", "height", "batch", "channels"), whole())}

    def build(self, seed: int, width: int, height: int, batch: int, channels: int) -> tuple[Any]:
        """An image (batch, height, width, channels), 0 to 1; each image of a batch is different."""
        generator = torch.Generator("cpu").manual_seed(seed)
        patches = torch.rand((batch, height // 8 + 1, width // 8 + 1, channels), generator=generator)
        return (patches.repeat_interleave(8, 1).repeat_interleave(8, 2)[:, :height, :width].contiguous(),)
