"""A pack of its own that does what ComfyUI-GGUF does: layers that decode the weights of a GGUF file in each call.

The protocol is that pack's (`tensor_type`, `tensor_shape`, `patches`), and so is float16 for decoding. The code is
ours. `FORMATS` says which formats it can decode.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import comfy.lora
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.utils
import torch


class Kind(enum.Enum):
    """As the package gguf numbers the formats."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q8_0 = 8
    Q4_K = 12
    IQ1_S = 19


def _half(data: torch.Tensor) -> torch.Tensor:
    return data.contiguous().view(torch.float16)


def _halves(data: torch.Tensor) -> torch.Tensor:
    """Low nibbles, then high ones, of (blocks, groups, bytes)."""
    return torch.cat([data & 15, data >> 4], dim=-1)


def _q8_0(data: torch.Tensor) -> torch.Tensor:
    return _half(data[:, :2]) * data[:, 2:].contiguous().view(torch.int8)


def _q4_0(data: torch.Tensor) -> torch.Tensor:
    return _half(data[:, :2]) * (_halves(data[:, 2:]).to(torch.int8) - 8)


def _q4_k(data: torch.Tensor) -> torch.Tensor:
    scale, least, packed = _half(data[:, :2]), _half(data[:, 2:4]), data[:, 4:16]
    first, second, both = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (both & 15) | ((first >> 6) << 4)], dim=1)
    minima = torch.cat([second & 63, (both >> 4) | ((second >> 6) << 4)], dim=1)
    numbers = _halves(data[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return (scale * scales)[:, :, None] * numbers - (least * minima)[:, :, None]


# By kind, the numbers and the bytes of a block, and what decodes (blocks, bytes).
FORMATS: dict[Kind, tuple[int, int, Callable[[torch.Tensor], torch.Tensor]]] = {
    Kind.Q8_0: (32, 34, _q8_0),
    Kind.Q4_0: (32, 18, _q4_0),
    Kind.Q4_K: (256, 144, _q4_k),
    Kind.IQ1_S: (256, 50, lambda data: data.to(torch.float16).repeat(1, 6)[:, :256]),  # no real one: any numbers
}


class FileTensor(torch.Tensor):
    """The bytes of a weight. It says the shape of its numbers."""

    def __new__(cls, data: torch.Tensor, kind: Kind, shape: torch.Size) -> FileTensor:
        made: FileTensor = data.as_subclass(cls)
        made.tensor_type, made.tensor_shape, made.patches = kind, shape, []
        return made

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Carry the attributes along."""
        moved = super().to(*args, **kwargs)
        moved.tensor_type = getattr(self, "tensor_type", None)
        moved.tensor_shape = getattr(self, "tensor_shape", moved.size())
        moved.patches = list(getattr(self, "patches", ()))
        return moved

    def detach(self) -> FileTensor:
        """Nothing needs gradients."""
        return self

    @property
    def shape(self) -> torch.Size:
        """Of the numbers."""
        if "tensor_shape" not in vars(self):
            self.tensor_shape = self.size()
        return self.tensor_shape


def _is_packed(weight: Any) -> bool:
    return getattr(weight, "tensor_type", None) in FORMATS


class Layer(torch.nn.Module):
    """The base of the layers."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        for name in ("weight", "bias"):
            if prefix + name in state:
                setattr(self, name, torch.nn.Parameter(state[prefix + name], requires_grad=False))

    def numbers(self, weight: Any, dtype: torch.dtype) -> Any:
        """The numbers of a weight, with its LoRAs."""
        if not _is_packed(weight):
            return None if weight is None else weight.to(dtype).as_subclass(torch.Tensor)
        size, decode = FORMATS[weight.tensor_type][1:]
        data = torch.Tensor(weight).reshape(-1, size)
        found = decode(data).reshape(weight.tensor_shape).to(dtype)
        for patches, key in weight.patches:
            found = comfy.lora.calculate_weight(patches, found, key)
        return found

    def forward_comfy_cast_weights(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Decode, or do what core does."""
        if not _is_packed(self.weight):
            found = super().forward_comfy_cast_weights(input, *args, **kwargs)  # type: ignore[misc]
            return torch.Tensor(found) if isinstance(found, FileTensor) else found
        weight, bias = self.numbers(self.weight, input.dtype), self.numbers(self.bias, input.dtype)
        return torch.nn.functional.linear(input, weight, bias)


class Operations(comfy.ops.manual_cast):  # type: ignore[misc]
    """For `custom_operations` of core's loader."""

    class Linear(Layer, comfy.ops.manual_cast.Linear):  # type: ignore[misc]
        """It allocates no weight before it is given one."""

        def __init__(self, in_features: int, out_features: int, bias: bool = True, **more: Any) -> None:
            torch.nn.Module.__init__(self)
            self.in_features, self.out_features = in_features, out_features
            self.weight = self.bias = None


class Patcher(comfy.model_patcher.ModelPatcher):  # type: ignore[misc]
    """Core's, with LoRAs kept beside the bytes."""

    def patch_weight_to_device(
        self, key: str, device_to: Any = None, inplace_update: bool = False, **more: Any
    ) -> None:
        """Core asks for it when it loads a model."""
        weight = comfy.utils.get_attr(self.model, key)
        if not _is_packed(weight):
            super().patch_weight_to_device(key, device_to, inplace_update, **more)
        elif key in self.patches:
            patched = weight.to(device_to)
            patched.patches = [(self.patches[key], key)]
            comfy.utils.set_attr_param(self.model, key, patched)

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> None:
        """Core asks for it when it unloads a model, or loads other LoRAs."""
        for weight in self.model.parameters() if unpatch_weights else ():
            if _is_packed(weight):
                weight.patches = []
        super().unpatch_model(device_to=device_to, unpatch_weights=unpatch_weights)

    def load(self, *args: Any, force_patch_weights: bool = False, **kwargs: Any) -> None:
        """Patch in any case: no layer does it on the way."""
        super().load(*args, force_patch_weights=True, **kwargs)


def load(weights: dict[str, torch.Tensor], options: dict[str, Any]) -> Patcher:
    """A model of a state dict, by core's loader. options: the model_options of that."""
    found = comfy.sd.load_diffusion_model_state_dict(weights, {**options, "custom_operations": Operations()})
    return Patcher(found.model, found.load_device, found.offload_device)
