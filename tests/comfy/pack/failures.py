"""Inputs that cannot work, and a patch that fails inside the model's forward."""

from __future__ import annotations

from typing import Any

import torch

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


class ResoluteTestFailingBlock:
    """Raises in the middle of the second step's forward, between two blocks or inside one."""

    CATEGORY = "resolute/test"
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "where": (list(PATCHES),)}}

    def patch(self, model: Any, where: str) -> tuple[Any]:
        patched = model.clone()
        patched.set_model_patch(PATCHES[where], where)
        return (patched,)


class ResoluteTestEmptyConditioning:
    """Empty conditioning: an empty list, or a text without tokens."""

    CATEGORY = "resolute/test"
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"kind": (["no entry", "no token"],)}}

    def make(self, kind: str) -> tuple[list[Any]]:
        return ([] if kind == "no entry" else [[torch.zeros((1, 0, 768)), {}]],)


class ResoluteTestResidual:
    """Adds a residual to the tiny model's middle block, as a ControlNet does."""

    CATEGORY = "resolute/test"
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        size = ("INT", {"default": 1, "min": 1, "max": 1024})
        return {"required": {"model": ("MODEL",), "width": size, "height": size}}

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
