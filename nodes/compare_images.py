"""Compare Images: two batches of images -> error numbers and a heat map."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .adapters.comfyui.messages import on_node
from .adapters.comfyui.version import search_aliases
from .adapters.report import image_comparison
from .inputs import CATEGORY, require_numbers


class CompareImages(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ResoluteCompareImages",
            display_name="Compare Images (PSNR, Heat Map)",  # core has a Compare Images
            category=CATEGORY,
            **search_aliases("difference", "psnr", "ssim", "heat map", "before and after", "benchmark", "measure"),
            description=(
                "Measures how much two images differ: largest and mean error, PSNR, SSIM and a heat map. It can also "
                "fail the prompt when they differ too much."
            ),
            inputs=[
                io.Image.Input("image_a", tooltip="An image or a batch. Pairs are compared in order."),
                io.Image.Input("image_b", tooltip="The images to compare with: the same number and size."),
                _limit(
                    "max_error",
                    image_comparison.LEVELS,
                    image_comparison.LEVELS,
                    "Fail if any value differs by more than this many of 255 levels; a saved image has steps of 1. "
                    "255 never fails.",
                ),
                _limit(
                    "min_psnr",
                    0.0,
                    200.0,
                    "Fail if the PSNR of any pair is lower than this, in dB: differences at 40 are hard to see, above "
                    "50 only rounding. 0 never fails.",
                ),
            ],
            outputs=[
                io.String.Output(display_name="text", tooltip="The report: one line for each pair."),
                io.Image.Output(
                    display_name="heat_map",
                    tooltip="Where the images differ: black is no error, pale yellow the largest error, which the "
                    "report names. Green marks NaN or infinite values.",
                ),
                io.Float.Output(display_name="max_error", tooltip="The largest error of all pairs, in levels of 255."),
                io.Float.Output(display_name="mean_error", tooltip="The mean error of all pairs, in levels of 255."),
                io.Float.Output(
                    display_name="psnr", tooltip="The lowest PSNR of all pairs, in dB; infinite if identical."
                ),
                io.Float.Output(display_name="ssim", tooltip="The lowest SSIM of all pairs; 1 if identical."),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, image_a: Any, image_b: Any, max_error: float, min_psnr: float) -> io.NodeOutput:
        """Raises UserError for a limit that is not a number, and ValueError if the shapes differ or if the images
        differ by more than a limit.
        """
        require_numbers(max_error=max_error, min_psnr=min_psnr)
        scores = image_comparison.compare(image_a, image_b)
        problem = image_comparison.failure(scores, max_error, min_psnr)
        if problem is not None:
            raise ValueError(problem)
        text = image_comparison.report(scores, max_error, min_psnr)
        numbers = (scores.max_error, scores.mean_error, scores.psnr, scores.ssim)
        return io.NodeOutput(text, scores.heat_map, *numbers, ui=on_node(text))


def _limit(name: str, default: float, maximum: float, tooltip: str) -> io.Float.Input:
    return io.Float.Input(name, default=default, min=0.0, max=maximum, step=0.5, tooltip=tooltip)
