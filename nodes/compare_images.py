"""Compare Images: two batches of images -> how far they are apart, and where."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .adapters.report import image_comparison
from .inputs import CATEGORY


class CompareImages(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ResoluteCompareImages",
            display_name="Compare Images",
            category=CATEGORY,
            description=(
                "Measures how far two images are apart, for example a compiled picture and ComfyUI's own: largest and "
                "mean error, PSNR, SSIM, and a map of where. It can stop the prompt if they are too far apart."
            ),
            inputs=[
                io.Image.Input("image_a", tooltip="One image, or a batch: pairs are compared in order."),
                io.Image.Input("image_b", tooltip="The other, as many and of the same size."),
                _limit(
                    "max_error",
                    image_comparison.LEVELS,
                    image_comparison.LEVELS,
                    "Fail if any value of any pair differs by more, in levels of 255 (1 is the smallest step of a "
                    "saved picture). 255 never fails.",
                ),
                _limit(
                    "min_psnr",
                    0.0,
                    200.0,
                    "Fail if the PSNR of any pair is lower, in dB. 40 is hard to see, 50 and more is rounding. "
                    "0 never fails.",
                ),
            ],
            outputs=[
                io.String.Output(display_name="text", tooltip="The report: one line for each pair."),
                io.Image.Output(
                    display_name="heat_map",
                    tooltip="Where they differ, of the images' size: black is no error, pale yellow the largest of "
                    "the batch (at least one level). The report names that error. Green: a value that is no number.",
                ),
                io.Float.Output(display_name="max_error", tooltip="The largest error of all pairs, in levels of 255."),
                io.Float.Output(display_name="mean_error", tooltip="The mean error of all pairs, in levels of 255."),
                io.Float.Output(display_name="psnr", tooltip="The lowest of all pairs, in dB; infinite if identical."),
                io.Float.Output(display_name="ssim", tooltip="The lowest of all pairs; 1 if identical."),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, image_a: Any, image_b: Any, max_error: float, min_psnr: float) -> io.NodeOutput:
        """Raises ValueError for images of different shapes, and for a limit that is not kept."""
        found = image_comparison.compare(image_a, image_b)
        problem = image_comparison.failure(found, max_error, min_psnr)
        if problem is not None:
            raise ValueError(problem)
        text = image_comparison.report(found, max_error, min_psnr)
        numbers = (found.max_error, found.mean_error, found.psnr, found.ssim)
        return io.NodeOutput(text, found.heat_map, *numbers, ui={"text": (text,)})


def _limit(name: str, off: float, largest: float, tooltip: str) -> io.Float.Input:
    return io.Float.Input(name, default=off, min=0.0, max=largest, step=0.5, tooltip=tooltip)
