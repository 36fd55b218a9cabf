"""OneDiff's node that compares images."""

from __future__ import annotations

import math
from typing import Any

import torch
from comfy_api.latest import io

from ...compile_cache.errors import UserError, excerpt
from ..adapters.comfyui.messages import on_node
from ..adapters.report.image_comparison import LEVELS, compare, report
from .common import ignored_text, node

_SWITCH = ("enable", "disable")
_TOLERANCE = "1e-4"
_OLD_LIMIT = "Of OneDiff's first versions, as in torch.allclose. Empty: ssim_threshold is the limit."


def _compare(
    node_id: str | None,
    images1: Any,
    images2: Any,
    ssim_threshold: str = "0.9",
    raise_if_diff: str = "enable",
    image_id: str = "",
    rtol: str = "",
    atol: str = "",
) -> io.NodeOutput:
    """Raises ValueError if the shapes differ or the images differ too much, UserError for a limit that is no number."""
    if raise_if_diff not in _SWITCH and image_id in _SWITCH:
        # Saved by OneDiff before March 2024: a workflow stores values by place, and rtol and atol were the first two.
        rtol, atol, raise_if_diff, image_id = ssim_threshold, raise_if_diff, image_id, rtol
    scores = compare(images1, images2)
    text = report(scores, LEVELS, 0.0)
    if raise_if_diff == "enable":
        problem = _problem(images1, images2, scores.ssim, ssim_threshold, rtol, atol)
        if problem:
            raise ValueError(f"The images differ: {problem}.\n{text}")
    return io.NodeOutput(ui=on_node(text))


def _problem(images1: Any, images2: Any, ssim: float, ssim_threshold: str, rtol: str, atol: str) -> str:
    """Say which limit is broken; empty if none is. With a tolerance the limit is that of torch.allclose, as it was."""
    if rtol or atol:
        relative, absolute = _number("rtol", rtol or _TOLERANCE), _number("atol", atol or _TOLERANCE)
        same = torch.allclose(images1, images2, rtol=relative, atol=absolute)
        return "" if same else f"not all values are within rtol {relative:g} and atol {absolute:g}"
    limit = _number("ssim_threshold", ssim_threshold)
    return "" if ssim > limit else f"SSIM {ssim:.4f} is not above the limit {limit:g}"


def _inputs() -> list[Any]:
    tooltip = "The lowest SSIM that is allowed, 0 to 1."
    return [
        io.Image.Input("images1", tooltip="An image or a batch."),
        io.Image.Input("images2", tooltip="The images to compare with: the same number and size."),
        io.String.Input("ssim_threshold", default="0.9", optional=True, tooltip=tooltip),
        io.String.Input(
            "raise_if_diff", default="enable", optional=True, tooltip="enable stops the prompt below the limit."
        ),
        ignored_text("image_id", "ComfyUI"),
        # Behind the others, because the newer version's workflows store values by place too.
        *(io.String.Input(name, default="", optional=True, tooltip=_OLD_LIMIT) for name in ("rtol", "atol")),
    ]


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isfinite(value):
        return value
    raise UserError(f"{name} '{excerpt(text)}' is no number; choose one from 0 to 1, for example 0.9.")


NODES = [
    node(
        "ShowImageDiff",
        "Image Distinction Scanner",
        "Compare Images",
        "It measures how much two images differ, and can stop the prompt at a low SSIM.",
        _inputs,
        list,
        _compare,
    )
]
