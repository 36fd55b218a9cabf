"""OneDiff's node that compares images."""

from __future__ import annotations

import math
from typing import Any

from comfy_api.latest import io

from ...compile_cache.errors import UserError, excerpt
from ..adapters.report.image_comparison import LEVELS, compare, report
from .common import ignored_text, node


def _compare(
    node_id: str | None,
    images1: Any,
    images2: Any,
    ssim_threshold: str = "0.9",
    raise_if_diff: str = "enable",
    image_id: str = "",
) -> io.NodeOutput:
    """Raises ValueError if the shapes differ or the SSIM is too low, UserError for a limit that is no number."""
    scores = compare(images1, images2)
    text = report(scores, LEVELS, 0.0)
    if raise_if_diff == "enable" and not scores.ssim > (limit := _number(ssim_threshold)):
        raise ValueError(f"The images differ: SSIM {scores.ssim:.4f} is not above the limit {limit:g}.\n{text}")
    return io.NodeOutput(ui={"text": (text,)})


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
    ]


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isfinite(value):
        return value
    raise UserError(f"ssim_threshold '{excerpt(text)}' is no number; choose one from 0 to 1, for example 0.9.")


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
