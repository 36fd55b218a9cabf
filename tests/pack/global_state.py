"""What other packs change for everybody while a model samples: torch's flags and functions of core's modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import comfy.ldm.modules.attention as attention
import comfy.ldm.modules.diffusionmodules.openaimodel as openaimodel
import comfy.model_management
import comfy.ops
import comfy.patcher_extension
import numpy as np
import torch

from .node import Node

GAIN = 1.2


@contextlib.contextmanager
def _exchanged(module: Any, *names: str) -> Iterator[None]:
    """Meanwhile these functions of a module give `GAIN` times their result."""
    before = {name: getattr(module, name) for name in names}
    for name, function in before.items():
        setattr(module, name, _louder(function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def _louder(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs) * GAIN


def _autocast() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(comfy.model_management.get_torch_device().type, torch.bfloat16)


@contextlib.contextmanager
def _fp16_accumulation() -> Iterator[None]:
    """As KJNodes' Model Patch Torch Settings does; NVIDIA alone reads the flag."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_accumulation
    matmul.allow_fp16_accumulation = True
    try:
        yield
    finally:
        matmul.allow_fp16_accumulation = before


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@contextlib.contextmanager
def _no_flash_attention() -> Iterator[None]:
    before = torch.backends.cuda.flash_sdp_enabled()  # its name says cuda, and the CPU's kernel obeys it too
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_flash_sdp(before)


@contextlib.contextmanager
def _assigned_code() -> Iterator[None]:
    """The function stays the same object, and only its code is another one."""
    function: Any = attention.FeedForward.forward
    before = function.__code__
    function.__code__ = (lambda self, x: self.net(x) * 1.2).__code__
    try:
        yield
    finally:
        function.__code__ = before


@contextlib.contextmanager
def _global_hook() -> Iterator[None]:
    def hook(module: Any, args: Any, result: Any) -> Any:
        return result * GAIN if isinstance(module, attention.FeedForward) else None

    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


class _Eps(float):
    """A number of a class of its own."""


class _Louder(comfy.ops.disable_weight_init.GroupNorm):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) * GAIN


@contextlib.contextmanager
def _norms(network: torch.nn.Module, name: str, value: Any) -> Iterator[None]:
    """Meanwhile an attribute of all norms in the middle of a network, or their class, is another one."""
    norms = [part for part in network.middle_block.modules() if isinstance(part, torch.nn.GroupNorm)]
    before = [getattr(each, name) for each in norms]
    for each in norms:
        setattr(each, name, value)
    try:
        yield
    finally:
        for each, own in zip(norms, before, strict=True):
            setattr(each, name, own)


@contextlib.contextmanager
def _other_defaults() -> Iterator[None]:
    """Of a function, which stays the same object."""
    function: Any = openaimodel.timestep_embedding
    before = function.__defaults__
    function.__defaults__ = tuple(1000 if each == 10000 else each for each in before)
    try:
        yield
    finally:
        function.__defaults__ = before


# What changes inside a model without another object in its place, by the network.
INSIDE: dict[str, Callable[[Any], contextlib.AbstractContextManager[Any]]] = {
    "number of numpy": lambda network: _norms(network, "eps", np.float64(0.5)),
    "another number of numpy": lambda network: _norms(network, "eps", np.float64(0.05)),
    "number of a pack": lambda network: _norms(network, "eps", _Eps(0.5)),
    "class of a layer": lambda network: _norms(network, "__class__", _Louder),
    "other defaults": lambda network: _other_defaults(),
}
CONTEXTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "autocast": _autocast,
    "fp16 accumulation": _fp16_accumulation,
    "deterministic": _deterministic,
    "no flash attention": _no_flash_attention,
    "exchanged attention": lambda: _exchanged(attention, "optimized_attention", "optimized_attention_masked"),
    "exchanged torch attention": lambda: _exchanged(torch.nn.functional, "scaled_dot_product_attention"),
    "exchanged attention of core's": lambda: _exchanged(comfy.ops, "scaled_dot_product_attention"),
    "exchanged activation": lambda: _exchanged(torch.nn.functional, "silu"),  # of residual blocks
    "exchanged gelu": lambda: _exchanged(torch.nn.functional, "gelu"),  # of transformers
    "exchanged method": lambda: _exchanged(openaimodel.ResBlock, "_forward"),
    "assigned code": _assigned_code,
    "global hook": _global_hook,
    "exchanged embedding": lambda: _exchanged(openaimodel, "timestep_embedding"),
}


class ResoluteTestGlobalState(Node):
    """The model samples inside one of ``CONTEXTS`` or ``INSIDE``; other models of the same prompt do not."""

    FUNCTION = "patch"
    INPUTS = {"model": ("MODEL",), "kind": ([*CONTEXTS, *INSIDE],)}

    def patch(self, model: Any, kind: str) -> tuple[Any]:
        def sample(executor: Any, *args: Any, **kwargs: Any) -> Any:
            with CONTEXTS[kind]() if kind in CONTEXTS else INSIDE[kind](patched.model.diffusion_model):
                return executor(*args, **kwargs)

        patched = model.clone()
        patched.add_wrapper(comfy.patcher_extension.WrappersMP.OUTER_SAMPLE, sample)
        return (patched,)
