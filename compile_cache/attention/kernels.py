"""The attention kernels to choose from. Each is called by itself: torch's switch between them holds for the process."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

# q, k, v: (batch, heads, tokens, width), and the scale. The result has the shape of q, with the width of v.
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "float | None"], torch.Tensor]

FLASH_3 = "flash_attn_interface"  # FlashAttention 3, for Hopper, is a package of its own
# Slower than flash at every size where flash runs (by 1.1 to 2.2 times on an H200). It takes what flash refuses.
STAND_IN = "efficient"

_aten = torch.ops.aten


def torchs_choice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    result: torch.Tensor = _aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)[0]
    return result


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    result: torch.Tensor = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, False, scale=scale)[0]
    return result


def _efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    result: torch.Tensor = _aten._scaled_dot_product_efficient_attention(q, k, v, None, False, scale=scale)[0]
    return result


def _flash_3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    attention = importlib.import_module(FLASH_3).flash_attn_func
    result: Any = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), softmax_scale=scale)
    tokens: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return tokens.transpose(1, 2)


def kernels_for(device: torch.device) -> dict[str, Kernel]:
    """The kernels to choose from, the preferred one first. Empty where torch chooses among its own: on a CPU."""
    if device.type != "cuda":
        return {}
    # People switch one off where it is wrong.
    switched: dict[str, Kernel] = {"flash": _flash, STAND_IN: _efficient, "cudnn": _cudnn}
    kernels = {name: kernel for (name, kernel), is_on in zip(switched.items(), switches(), strict=False) if is_on}
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    if "flash" in kernels and is_hopper and find_spec(FLASH_3) is not None:
        kernels["flash 3"] = _flash_3
    return kernels


def switches() -> tuple[bool, ...]:
    """Torch's switches of flash, efficient, cuDNN's and plain attention, and the one for reproducible results."""
    cuda: Any = torch.backends.cuda
    found = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.cudnn_sdp_enabled, cuda.math_sdp_enabled)
    return (*(is_on() for is_on in found), torch.are_deterministic_algorithms_enabled())
