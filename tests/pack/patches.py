"""Every way in which core lets a node change a UNet's computation, each with a visible effect."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import comfy.ldm.modules.attention as attention
import comfy.ldm.modules.diffusionmodules.openaimodel as openaimodel
import comfy.patcher_extension
import torch

from . import global_state
from .node import Node

GAIN = 1.2


def _qkv(q: Any, k: Any, v: Any, extra: Any) -> Any:
    return q, k, v * GAIN


def _tensor(x: Any, extra: Any) -> Any:
    return x * GAIN


def _only_values(q: Any, k: Any, v: Any, extra: Any, **kwargs: Any) -> Any:
    return q * GAIN


def _attention(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs) * GAIN


def _output_block(h: Any, skip: Any, options: Any) -> Any:
    return h * GAIN, skip


def _embedding(emb: Any, channels: int, options: Any) -> Any:
    return emb * GAIN


def _middle_after(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"h": arguments["h"] * GAIN}


def _residual_layer(layer: Any, x: Any, emb: Any, *args: Any) -> Any:
    return layer(x, emb) * GAIN


def _wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
    return executor(*args, **kwargs) * GAIN


def _override(model: Any) -> None:
    model.model_options["transformer_options"]["optimized_attention_override"] = _attention


def _replace_forward(model: Any) -> None:
    name = "diffusion_model.middle_block.0.forward"
    inner = model.get_model_object(name)
    model.add_object_patch(name, lambda x, emb: inner(x, emb) * GAIN)


def _add_wrapper(kind: str) -> Callable[[Any], None]:
    # Look it up only when used, so that the pack loads in a version without it.
    return lambda model: model.add_wrapper(getattr(comfy.patcher_extension.WrappersMP, kind), _wrapper)


def _replace(name: str, block: tuple[str, int]) -> Callable[[Any], None]:
    return lambda model: model.set_model_patch_replace(_only_values, name, *block)


def _patch(name: str, patch: Any) -> Callable[[Any], None]:
    return lambda model: model.set_model_patch(patch, name)


class _Gain(torch.nn.Module):
    """Replaces a whole network by another one, as packs do with a network that they compiled."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "network" else getattr(self.network, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.network(*args, **kwargs) * GAIN


def _exchange_network(model: Any) -> None:
    model.add_object_patch("diffusion_model", _Gain(model.get_model_object("diffusion_model")))


def _change_in_place(model: Any) -> None:
    network = model.model.diffusion_model
    inner = type(network)._forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return inner(self, *args, **kwargs) * GAIN

    network._forward = types.MethodType(forward, network)


def _for_some_steps(model: Any) -> None:
    """In some steps a block is patched or a setting changed while the model is called, as between two percents."""

    def around(apply_model: Callable[..., Any], given: dict[str, Any]) -> Any:
        block = model.model.diffusion_model.middle_block[0]
        norm = block.in_layers[0]
        options = given["c"]["transformer_options"]
        sigma, first = float(options["sigmas"][0]), float(options["sample_sigmas"][0])
        step = int(sigma * 1000) % 3 if sigma < first else 0  # the first step finds the model as it is
        inner, eps, own = block.forward, norm.eps, dict(vars(block))
        if step == 1:
            block.forward = lambda *args, **kwargs: inner(*args, **kwargs) * GAIN
        elif step == 2:
            norm.eps = 0.5
        try:
            return apply_model(given["input"], given["timestep"], **given["c"])
        finally:
            norm.eps = eps
            vars(block).pop("forward", None)
            vars(block).update({name: own[name] for name in ("forward",) if name in own})

    model.set_model_unet_function_wrapper(around)


def _inside_for_some_steps(model: Any) -> None:
    """In some steps a number of a layer has another type and value, or the layer another class, or a function of core's
    other code: no object is exchanged.
    """

    def around(apply_model: Callable[..., Any], given: dict[str, Any]) -> Any:
        network, options = model.model.diffusion_model, given["c"]["transformer_options"]
        sigma, first = float(options["sigmas"][0]), float(options["sample_sigmas"][0])
        names = ["", *global_state.INSIDE, "assigned code"]
        name = names[int(sigma * 1000) % len(names)] if sigma < first else ""  # the first step finds it as it is
        change = global_state.INSIDE.get(name)
        context = change(network) if change else global_state.CONTEXTS.get(name, contextlib.nullcontext)()
        with context:
            return apply_model(given["input"], given["timestep"], **given["c"])

    model.set_model_unet_function_wrapper(around)


def _masked(original: Callable[..., Any], q: Any, k: Any, v: Any, heads: int, *args: Any, **kwargs: Any) -> Any:
    """Attention to four of seven tokens, by a mask that is added.

    ComfyUI repeats a shorter text when it merges two calls. Seven divides 77, so the same tokens are masked there.
    """
    mask = torch.zeros(1, 1, q.shape[-2], k.shape[-2], dtype=q.dtype, device=q.device)
    mask[..., torch.arange(k.shape[-2], device=q.device) % 7 > 3] = torch.finfo(q.dtype).min
    return original(q, k, v, heads, **{**kwargs, "mask": mask})


def _mask_attention(model: Any) -> None:
    model.model_options["transformer_options"]["optimized_attention_override"] = _masked


APPLY: dict[str, Callable[[Any], None]] = {
    # Inside transformer blocks.
    "attn1_patch": _patch("attn1_patch", _qkv),
    "attn2_patch": _patch("attn2_patch", _qkv),
    "attn1_output_patch": _patch("attn1_output_patch", _tensor),
    "attn2_output_patch": _patch("attn2_output_patch", _tensor),
    "middle_patch": _patch("middle_patch", _tensor),
    "attn1_replace": _replace("attn1", ("middle", 0)),
    "attn2_replace": _replace("attn2", ("input", 1)),
    "attention_override": _override,
    "masked_attention": _mask_attention,
    # Between blocks.
    "input_block_patch": _patch("input_block_patch", _tensor),
    "input_block_patch_after_skip": _patch("input_block_patch_after_skip", _tensor),
    "output_block_patch": _patch("output_block_patch", _output_block),
    "middle_block_after_patch": _patch("middle_block_after_patch", _middle_after),
    "emb_patch": _patch("emb_patch", _embedding),
    "forward_timestep_embed_patch": _patch("forward_timestep_embed_patch", (openaimodel.ResBlock, _residual_layer)),
    # Around the model.
    "apply_model_wrapper": _add_wrapper("APPLY_MODEL"),
    "diffusion_model_wrapper": _add_wrapper("DIFFUSION_MODEL"),
    # Instead of a block's forward.
    "replaced_forward": _replace_forward,
    "patched_for_some_steps": _for_some_steps,
    "changed_inside_for_some_steps": _inside_for_some_steps,
    "exchanged_network": _exchange_network,
    # On the model itself, so it affects every clone.
    "changed_in_place": _change_in_place,
}


class ResoluteTestPatch(Node):
    """Clones the model and applies one of the changes in ``APPLY``."""

    FUNCTION = "patch"
    INPUTS = {"model": ("MODEL",), "kind": (list(APPLY),)}

    def patch(self, model: Any, kind: str) -> tuple[Any]:
        patched = model.clone()
        APPLY[kind](patched)
        return (patched,)


class ResoluteTestAttention(Node):
    """Chooses an attention for a model as core's nodes do: one that is registered with core, and dims what it gives.

    It stands for SageAttention and others, which need a GPU.
    """

    FUNCTION = "patch"
    INPUTS = {"model": ("MODEL",)}
    NAME = "resolute_test"

    def patch(self, model: Any) -> tuple[Any]:
        """Clone the model and give it the attention."""
        if self.NAME not in attention.REGISTERED_ATTENTION_FUNCTIONS:
            attention.register_attention_function(self.NAME, attention.wrap_attn(_dimmed))
        patched = model.clone()
        patched.set_model_optimized_attention(attention.REGISTERED_ATTENTION_FUNCTIONS[self.NAME])
        return (patched,)


def _dimmed(*args: Any, **kwargs: Any) -> torch.Tensor:
    result: torch.Tensor = attention.attention_pytorch(*args, **kwargs) / GAIN
    return result
