"""Inputs that cannot work, and patches that fail during sampling."""

from __future__ import annotations

import contextlib
from typing import Any

import comfy.samplers
import torch

from .node import Node, whole

MESSAGE = "ResoluteTestFailingBlock: asked to fail"


def _check(options: dict[str, Any]) -> None:
    if float(options["sigmas"][0]) < float(options["sample_sigmas"][0]):
        raise ValueError(MESSAGE)


def _tensor(h: Any, options: dict[str, Any]) -> Any:
    _check(options)
    return h


def _skip(h: Any, skip: Any, options: dict[str, Any]) -> Any:
    _check(options)
    return h, skip


def _qkv(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    _check(options)
    return q, k, v


PATCHES = {"input_block_patch": _tensor, "output_block_patch": _skip, "attn1_patch": _qkv}


class ResoluteTestFailingBlock(Node):
    """Raises in the middle of the second step's forward, between two blocks or inside one."""

    FUNCTION = "patch"
    INPUTS = {"model": ("MODEL",), "where": (list(PATCHES),)}

    def patch(self, model: Any, where: str) -> tuple[Any]:
        patched = model.clone()
        patched.set_model_patch(PATCHES[where], where)
        return (patched,)


class ResoluteTestFailingPatch(Node):
    """Raises at the k-th call of the model in each run (0 is the first)."""

    FUNCTION = "patch"
    INPUTS = {"model": ("MODEL",), "step": whole(1, 0, 1000)}

    def patch(self, model: Any, step: int) -> tuple[Any]:
        """Clone the model and fail in its model function wrapper."""

        def call(apply_model: Any, arguments: dict[str, Any]) -> Any:
            options = arguments["c"]["transformer_options"]
            sigma = float(arguments["timestep"].flatten()[0])
            schedule = [float(value) for value in options["sample_sigmas"]]
            if sum(value > sigma for value in schedule) >= step:
                raise RuntimeError(f"ResoluteTestFailingPatch: asked to fail at step {step}")
            return apply_model(arguments["input"], arguments["timestep"], **arguments["c"])

        patched = model.clone()
        patched.set_model_unet_function_wrapper(call)
        return (patched,)


class ResoluteTestEmptyConditioning(Node):
    """Empty conditioning: an empty list, or a text without tokens."""

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"
    INPUTS = {"kind": (["no entry", "no token"],)}

    def make(self, kind: str) -> tuple[list[Any]]:
        return ([] if kind == "no entry" else [[torch.zeros((1, 0, 768)), {}]],)


class ResoluteTestResidual(Node):
    """Adds a residual to the tiny model's middle block, as a ControlNet does."""

    FUNCTION = "patch"
    INPUTS = {"model": ("MODEL",), "width": whole(), "height": whole()}

    def patch(self, model: Any, width: int, height: int) -> tuple[Any]:
        """width, height: of the residual; they need not match the middle block's."""

        def call(apply_model: Any, arguments: dict[str, Any]) -> Any:
            x = arguments["input"]
            residual = torch.linspace(-2, 2, 64 * height * width).reshape(1, 64, height, width)
            control = {"middle": [residual.to(x).expand(x.shape[0], -1, -1, -1)]}
            return apply_model(x, arguments["timestep"], **{**arguments["c"], "control": control})

        patched = model.clone()
        patched.set_model_unet_function_wrapper(call)
        return (patched,)


class ResoluteTestBrokenCapture(Node):
    """Lets the driver break the next capture that Resolute begins, as an unload of pages by DynamicVRAM does."""

    FUNCTION = "arm"
    INPUTS = {"model": ("MODEL",)}

    def arm(self, model: Any) -> tuple[Any]:
        graph: Any = torch.cuda.CUDAGraph
        begin = graph.capture_begin

        def broken(self: Any, *args: Any, **settings: Any) -> None:
            begin(self, *args, **settings)
            if "pool" in settings:  # an anchor of the pool has none
                graph.capture_begin = begin
                with contextlib.suppress(RuntimeError):
                    torch.cuda.synchronize()

        graph.capture_begin = broken
        return (model,)


class ResoluteTestChurn(Node):
    """The sampler `euler` with noise in each step, drawn on the latent's device from torch's own generator."""

    RETURN_TYPES = ("SAMPLER",)
    FUNCTION = "make"
    INPUTS: dict[str, Any] = {}

    def make(self) -> tuple[Any]:
        return (comfy.samplers.ksampler("euler", {"s_churn": 4.0}),)
